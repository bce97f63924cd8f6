"""Steps and precisions: what cannot be run is refused, and torch's settings are put back."""

from pathlib import Path

import pytest
import torch

from econv.train.execution import Execution, convolution_precision
from econv.train.processes import Processes
from tiny_training import start


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_the_settings_of_torch_are_put_back(precision: str) -> None:
    def settings() -> tuple[object, ...]:
        backend = torch.backends.cudnn
        if hasattr(backend, "conv"):
            return backend.benchmark, backend.conv.fp32_precision
        return backend.benchmark, backend.allow_tf32

    before = settings()
    execution = Execution(torch.device("cuda"), "graph", precision, False)
    with convolution_precision(execution):
        wanted = {"float32": ("ieee", False), "tf32": ("tf32", True)}[precision]
        assert settings()[0] is True
        assert settings()[1] in wanted
    assert settings() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": "graph"}, "a GPU for the step .graph.; got cpu"),
        ({"step": "fast"}, "expected a step in"),
        ({"precision": "tf32"}, "a GPU for the precision .tf32.; got cpu"),
        ({"precision": "float8"}, "expected a precision"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"seed": -1}, "expected a seed"),
    ],
)
def test_what_cannot_be_run_is_refused(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        start(tmp_path, **options)
    assert not (tmp_path / "out").exists()


def test_several_processes_run_eagerly() -> None:
    with pytest.raises(ValueError, match="'eager' with several processes"):
        Execution.choose(Processes(0, 2, torch.device("cpu")), "compile", None, None)
