"""The gate of compiled code under AddressSanitizer: no set of arguments leads out of a tensor.

Run by ``make fuzz-native``. The kernel is built with the sanitizer, which ends the process at the
first number that is read or written where none is. A set of arguments gives what operations of
torch give, or is refused with a sentence.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile

COMPILER = os.environ.get("CXX") or "c++"
FLAGS = ["-fsanitize=address", "-fno-omit-frame-pointer", "-g", "-O1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None, help="another one each time by default")
    given = parser.parse_args()
    if os.environ.get("ECONV_SANITIZED") != "1":
        raise SystemExit(_sanitized())
    seed = random.randrange(1 << 30) if given.seed is None else given.seed
    print(f"{given.cases} sets of arguments, --seed {seed}", flush=True)
    ran, refused = _fuzz(given.cases, random.Random(seed))
    print(f"{ran} ran and {refused} were refused; the sanitizer found nothing")
    assert min(ran, refused) > given.cases // 20, "too few of one kind to say anything"


def _sanitized() -> int:
    """The same again, where the sanitizer is loaded before everything else."""
    if shutil.which(COMPILER) is None:
        raise SystemExit(f"expected a C++ compiler; found no {COMPILER}")
    libraries = []
    for name in ("libasan.so", "libstdc++.so"):  # both before what Python loads
        command = [COMPILER, f"-print-file-name={name}"]
        libraries += subprocess.run(command, capture_output=True, text=True).stdout.split()
    if not libraries or not all(map(os.path.isabs, libraries)):
        raise SystemExit(f"expected AddressSanitizer; {COMPILER} has none: {libraries}")
    with tempfile.TemporaryDirectory(prefix="econv-") as folder:
        more = {"LD_PRELOAD": " ".join(libraries), "ECONV_CACHE": folder, "ECONV_SANITIZED": "1"}
        options = "detect_leaks=0:allocator_may_return_null=1:detect_odr_violation=0"
        environment = {**os.environ, **more, "ASAN_OPTIONS": options, "ECONV_MEASURE": "0"}
        return subprocess.run([sys.executable, *sys.argv], env=environment).returncode


def _fuzz(cases: int, rng: random.Random) -> tuple[int, int]:
    import torch

    from econv import filter_basis
    from econv.engines.spectral import native
    from econv.engines.spectral.gate import UnreadableError
    from econv.plan import spectral_plan

    native._TUNED = (FLAGS,)
    for dtype in (torch.float32, torch.float64):
        if reason := native.reason(dtype):
            raise SystemExit(f"expected the kernel under AddressSanitizer; {reason}")
    groups, sets = ("p1", "p2", "p3", "p4", "p8", "p1m", "p4m"), ("order<=0", "order<=1", "paper")
    kinds = (("scalar", "regular"), ("regular", "regular"), ("regular", "vector"))
    flat = [*itertools.product(groups, sets, kinds)]
    space = [*itertools.product(("C2", "T", "O"), ("order<=0", "order<=1"), kinds)]
    plans = [spectral_plan(filter_basis(group, some), *kind) for group, some, kind in flat + space]
    torch.manual_seed(rng.randrange(1 << 30))
    ran = refused = volumes = 0
    for number in range(cases):
        torch.set_num_threads(rng.choice((1, 2, 3, 8)))
        try:
            plan = rng.choice(plans)
            _product(rng, plan)
            ran += 1
            volumes += plan.basis.group.dimension == 3
        except UnreadableError:
            refused += 1
        if (number + 1) % 10_000 == 0:
            print(f"{number + 1}: {ran} ran, {refused} were refused", flush=True)
    assert volumes > cases // 20, "too few volumes to say anything"
    return ran, refused


def _product(rng, plan) -> None:
    import torch

    from econv.engines.problem import Geometry
    from econv.engines.spectral.native import Native
    from econv.engines.spectral.operator import Task
    from econv.engines.spectral.torch import apply

    small, odd = lambda most: rng.randint(1, most), rng.random() < 0.5
    dtype = rng.choice((torch.float32, torch.float64))
    flat = plan.basis.group.dimension == 2
    batch = rng.randint(0, 3)
    lengths = [small(24) for _ in "yx"] if flat else [small(8) for _ in "zyx"]
    size, dilation, down = plan.basis.size, small(3), small(3)
    before = rng.randint(0, dilation * (size - 1))
    reach = dilation * (size - 1) + 1
    out = [max(0, (n + 2 * before - reach) // down + 1) for n in lengths]
    geometry = Geometry(1, down, dilation, before, tuple(out))
    if rng.random() < 0.3:
        geometry = geometry.transposed(size, [n + rng.randint(0, 2) for n in lengths])
    if odd and rng.random() < 0.3:
        word = rng.choice(geometry._fields)
        value = rng.choice((-1, 0, 1, 2, 5, 17, 64, 65, 10**6, -(10**6), 2**62))
        if word == "sizes":
            value = rng.choice(((1,), (3, -1), (0, 4), (2, 2, 2), (17, 5)))
        geometry = geometry._replace(**{word: value})
    ins, outs = small(3), small(3)
    shape = (batch, ins * plan.analysis.shape[1], *lengths)
    result = (batch, outs * len(plan.synthesis), *(max(0, n) for n in geometry.sizes))
    x = _tensor(rng, shape, dtype, odd)
    weights = _tensor(rng, (outs, ins, plan.weights), dtype, odd and rng.random() < 0.3)
    other = _tensor(rng, result, dtype, odd and rng.random() < 0.3) if rng.random() < 0.6 else None
    wants = rng.random() < 0.8 or other is None
    found = Native().product(x, weights, Task(plan, geometry), other, wants)
    if not odd and rng.random() < 0.02 and x.numel() and min(result) and geometry.up == 1:
        wanted = apply(x.clone(), weights.clone(), plan, geometry, other)
        for one, two in zip(found, wanted, strict=True):
            if one is not None and two is not None:
                least = 1e-3 if dtype == torch.float32 else 1e-9
                scale = max(1.0, float(two.abs().max()))
                assert float((one - two).abs().max()) <= least * scale


def _tensor(rng, shape, dtype, odd):
    """A tensor of a shape; if it is to be odd, in another layout or not what was asked for."""
    import torch

    x = torch.randn(shape, dtype=dtype)
    if not odd:
        return x
    way = rng.randrange(10)
    if way == 0:
        return torch.cat([x, x], -1)[..., ::2]
    if way == 1:
        return torch.cat([x, x], 0)[::2]
    if way == 2 and x.ndim in (4, 5):
        last = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
        return x.contiguous(memory_format=last)
    if way == 3:
        return torch._neg_view(x)
    if way == 4:
        return x[:1].expand(shape) if len(x) else x
    if way == 5:
        return x.to(rng.choice((torch.float32, torch.float64, torch.int64, torch.bfloat16)))
    if way == 6:
        return x.to("meta")
    if way == 7:
        x.untyped_storage().resize_(x.untyped_storage().nbytes() // 2)
        return x
    if way == 8:
        place = rng.randrange(x.ndim)
        return torch.randn([n + (i == place) for i, n in enumerate(shape)], dtype=dtype)
    return x.unsqueeze(0) if rng.random() < 0.5 else x.transpose(-1, 0)


if __name__ == "__main__":
    main()
