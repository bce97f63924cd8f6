"""Does an installed econv work? What a stranger would try first; needs torch and numpy alone."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

import econv
from econv.engines import ENGINES
from econv.testing import assert_equivariant

assert Path(econv.__file__).is_relative_to(sys.prefix), "this is not the installed econv"
assert econv.__version__ == metadata.version("econv")
for name in econv.__all__:
    assert getattr(econv, name) is not None

# A network: it learns, and quarter turns change nothing.
torch.manual_seed(0)
network = nn.Sequential(
    *(econv.LiftConv2d(3, 4, "p8"), econv.GroupBatchNorm2d(4, "p8"), nn.ReLU()),
    *(econv.GroupConv2d(4, 8, "p8", stride=2, centred=True), econv.GroupPool2d("p8")),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)),
)
images, wanted = torch.randn(4, 3, 32, 32), torch.arange(4)
optimizer = torch.optim.AdamW(econv.parameter_groups(network, weight_decay=1e-2), lr=1e-2)
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(network(images), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
network.eval()
options = {"input_kind": "scalar", "output_kind": "invariant"}
assert_equivariant(network, images, "p8", **options)

# The engines agree; the native one compiles the sources that came with the wheel.
layer = econv.GroupConv2d(4, 4, "p8")
maps = torch.randn(2, 32, 17, 17)
known = {}
for name in ("dense", "spectral/torch", "spectral/native"):
    with econv.engine(name):
        try:
            known[name] = layer(maps)
        except ValueError as error:
            print(f"not tried: {error}")
for name, result in known.items():
    torch.testing.assert_close(result, known["dense"], rtol=1e-4, atol=1e-4, msg=name)

# Conversion, export and the compiler's front end.
cnn = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
                    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))  # fmt: skip
econv.convert(cnn, "p4", example_input=images)
torch.testing.assert_close(econv.export(network)(images), network(images), rtol=1e-4, atol=1e-5)
torch.export.export(network, (images,))


# The command, and the pages that it makes.
command = str(Path(sysconfig.get_path("scripts")) / "econv")
told = subprocess.run([command, "env", "--json"], capture_output=True, text=True, check=True).stdout
found = json.loads(told)
assert set(ENGINES) < set(found["engines"]["cpu"])
quick = ["--size", "33", "--count", "1", "--skip", "lie", "split", "advice", "sizes"]
check = [command, "check", *quick, "--tolerance", "1e-4", "--html", "page.html"]
subprocess.run(check, check=True, stdout=subprocess.DEVNULL)
assert "<svg" in Path("page.html").read_text(encoding="utf-8")

versions = [f"{name} {found['versions'][name]}" for name in ("econv", "python", "torch", "numpy")]
print(f"{', '.join(versions)}, engines {', '.join(known)}: all works")
