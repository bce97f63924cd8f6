"""benchmarks/networks.py: its networks, a small run, and what kernels are taken for."""

import json

import pytest
import torch

networks = pytest.importorskip("networks", reason="no benchmarks beside the tests")
timing = pytest.importorskip("timing", reason="no benchmarks beside the tests")

KERNELS = {
    "convolutions": [
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64",
        "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816wgrad_optimized>(int)",
        "sm80_xmma_dgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc",
        "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16>(int)",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816fprop_optimized_256x128>(int)",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
        *("analyse", "forward", "weight_gradient", "pack", "packed_rows", "arrange_rows"),
        *("largest", "largest_activated", "reduce", "to_affine", "spread"),
    ],
    "norms": [
        "void at::native::batch_norm_collect_statistics_channels_last_kernel<float>(float)",
        "triton_red_fused__native_batch_norm_legit_functional_copy__permute_relu_view_4",
        "triton_red_fused_convolution_backward_native_batch_norm_backward_threshold_backward_3",
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>(int)",
        *("add_statistics", "norm_backward", "moments", "activate"),
    ],
    "sampling": [
        "void at::native::(anonymous namespace)::max_pool_forward_nhwc<float>(int)",
        "triton_poi_fused_add_max_pool2d_with_indices_backward_threshold_backward_8",
        "triton_poi_fused_add_div_slice_view_0",
        "_mean_of_four",
    ],
    "filter expansion": [
        *("expand_filters", "filters_backward"),
        "triton_poi_fused__to_copy_convolution_12",
        "triton_poi_fused__unsafe_view_clone_index_select_view_6",
        "triton_poi_fused__unsafe_view_clone_transpose_view_1",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(int)",
        "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_execute_kernel__5x_cublas",
        "void at::native::indexSelectSmallIndex<float>(int)",
        "void at::native::indexFuncLargeIndex<float>(int)",
    ],
    "optimiser": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedSgdMathFunctor>()",
    ],
    "rest": [
        "triton_poi_fused_add_relu_3",
        "void at::native::reduce_kernel<512, 1>(float)",
        "void at::native::vectorized_elementwise_kernel<4, FillFunctor<float>>(int)",
        "Memcpy DtoD (Device -> Device)",
    ],
}


@pytest.mark.parametrize("kind", KERNELS)
def test_kernels_are_told_apart_by_their_names(kind):
    assert {name: networks.class_of(name) for name in KERNELS[kind]} == dict.fromkeys(
        KERNELS[kind], kind
    )


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_sources_have_as_many_parameters_as_torchvision(name):
    network = networks.NETWORKS[name]
    with torch.device("meta"):
        model = network.make()
    assert sum(p.numel() for p in model.parameters()) == network.parameters


@pytest.fixture
def small(monkeypatch):
    """A network of two stages instead of ResNet-18."""
    model = networks.resnet(networks.Basic, (1, 1))
    count = sum(p.numel() for p in model.parameters())
    make = lambda: networks.resnet(networks.Basic, (1, 1))  # noqa: E731
    monkeypatch.setitem(networks.NETWORKS, "resnet18", networks.Network(make, count, "width"))


def run(path, *more):
    sizes = ["--device", "cpu", "--batch", "1", "--size", "32", "--rounds", "1", "--seconds", "0"]
    networks.main([*sizes, "--json", str(path), *more])
    return json.loads(path.read_text())


def test_a_row_holds_the_source_and_both_engines(small, tmp_path, capsys):
    path = tmp_path / "found.json"
    found = run(path)
    (row,) = found["rows"]
    assert set(row["median"]) == {"source", "dense", "auto"}
    assert min(row["median"].values()) > 0
    assert row["chosen"]["dense"] == {"dense": 6}
    assert sum(row["chosen"]["auto"].values()) == 6
    assert row["errors"] == {}
    assert not found["stopped"]
    assert "over the source: dense" in capsys.readouterr().out

    # A record of the same code and sizes is continued, another one is not.
    found["rows"].append({**row, "way": "compile"})
    path.write_text(json.dumps(found))
    assert [r["way"] for r in run(path)["rows"]] == ["eager", "compile"]
    assert [r["way"] for r in run(path, "--batch", "2")["rows"]] == ["eager"]


def test_what_fails_is_told_and_does_not_end_the_run(small, tmp_path, monkeypatch):
    made = networks.training_step

    def fails(model, x, y, way):
        if any(layer.engine == "auto" for layer in networks.convolutions(model)):
            raise RuntimeError("out of memory")
        return made(model, x, y, way)

    monkeypatch.setattr(networks, "training_step", fails)
    (row,) = run(tmp_path / "found.json")["rows"]
    assert row["errors"] == {"auto": "RuntimeError: out of memory"}
    assert set(row["median"]) == {"source", "dense"}


def test_a_run_stops_at_its_limit(small, tmp_path, capsys):
    found = run(tmp_path / "found.json", "--limit", "0")
    assert found["rows"] == []
    assert found["stopped"]
    assert "stopped after 0 s" in capsys.readouterr().out


def test_a_cpu_captures_nothing():
    with pytest.raises(SystemExit):
        networks.main(["--device", "cpu", "--ways", "graph"])
