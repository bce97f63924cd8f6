"""A learned step of the shallow-water equations: swell from one side teaches all directions.

The state is a height and a velocity, a scalar and a vector field on a periodic sea, simulated by a
spectral solver. A p8 network and a plain CNN of as many parameters learn one step from waves that
run along x, and are then run freely on waves from other directions.

    python examples/waves.py --output outputs
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

import econv
from econv.testing import transform
from workshop import COLOURS, arguments, fit, parameters, publish

SIZE = 32  # pixels along each side of the sea
DURATION = 1.0  # of the step that is learned; waves run one pixel in a unit of time
SUBSTEPS = 2  # of the solver, within it
FREE_STEPS = 12
VISCOSITY = 0.02
DIRECTIONS = (0, 45, 90)  # degrees; the networks learn from the first
NAMES = {"p8": "p8", "plain": "plain CNN"}
RATES = {"p8": 1e-2, "plain": 3e-2}  # of learning; each network's own best

# ------------------------------------------------------------------------------- the solver

_frequencies = 2 * math.pi * torch.fft.fftfreq(SIZE, dtype=torch.float64)
_x = _frequencies.expand(SIZE, SIZE)
_y = -_x.T  # y points up
_kept = (_x.abs() < 2 / 3 * math.pi) & (_y.abs() < 2 / 3 * math.pi)  # products do not alias
_length = (_x**2 + _y**2).sqrt()


def rate_of_change(state: Tensor) -> Tensor:
    """∂η/∂t = −∇·((1+η)u), ∂u/∂t = −(u·∇)u − ∇η, and a little viscosity; ``[…, 3, y, x]``."""

    def along(spectrum: Tensor, frequency: Tensor) -> Tensor:
        return torch.fft.ifft2(1j * frequency * spectrum).real

    spectrum = torch.fft.fft2(state) * _kept
    height, u, v = torch.fft.ifft2(spectrum).real.unbind(-3)
    of_height, of_u, of_v = spectrum.unbind(-3)
    flow_x, flow_y = torch.fft.fft2((1 + height) * u), torch.fft.fft2((1 + height) * v)
    change = torch.stack(
        [
            -along(flow_x, _x) - along(flow_y, _y),
            -u * along(of_u, _x) - v * along(of_u, _y) - along(of_height, _x),
            -u * along(of_v, _x) - v * along(of_v, _y) - along(of_height, _y),
        ],
        dim=-3,
    )
    return change - VISCOSITY * torch.fft.ifft2(_length**2 * spectrum).real


def simulated(state: Tensor, steps: int) -> Tensor:
    """The state and what follows it, ``[steps + 1, …]``, by the classical Runge–Kutta method."""
    states, h = [state], DURATION / SUBSTEPS
    for _ in range(steps):
        for _ in range(SUBSTEPS):
            a = rate_of_change(state)
            b = rate_of_change(state + h / 2 * a)
            c = rate_of_change(state + h / 2 * b)
            d = rate_of_change(state + h * c)
            state = state + h / 6 * (a + 2 * b + 2 * c + d)
        states.append(state)
    return torch.stack(states)


def swell(count: int, degrees: float, seed: int) -> Tensor:
    """Random waves at rest that will run to and fro along one direction, ``[count, 3, y, x]``."""
    across = torch.atan2(_y, _x) - math.radians(degrees)
    across = torch.remainder(across + math.pi / 2, math.pi) - math.pi / 2
    power = torch.exp(-((across / 0.35) ** 2) - ((_length - 0.6) / 0.3) ** 2)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, SIZE, SIZE, generator=generator, dtype=torch.float64)
    height = torch.fft.ifft2(torch.fft.fft2(noise) * power * (_length > 0) * _kept).real
    height = 0.15 * height / height.std(dim=(1, 2), keepdim=True)
    return torch.stack([height, torch.zeros_like(height), torch.zeros_like(height)], dim=1)


# ------------------------------------------------------------------------------ the networks


class EquivariantStep(nn.Module):
    """state → next state: a scalar and a vector go in, a scalar and a vector come out."""

    def __init__(self, group: str = "p8", fields: int = 4) -> None:
        super().__init__()
        conv = partial(econv.GroupConv2d, group=group, padding_mode="circular", bias=True)
        self.body = nn.Sequential(
            econv.LiftConv2d(3, fields, group, vectors=1, padding_mode="circular", bias=True),
            nn.SiLU(),
            conv(fields, fields),
            nn.SiLU(),
        )
        self.height = nn.Sequential(conv(fields, 1), econv.GroupPool2d(group, reduce="mean"))
        self.velocity = econv.VectorConv2d(fields, 1, group, padding_mode="circular")

    def forward(self, state: Tensor) -> Tensor:
        features = self.body(state)
        return state + torch.cat([self.height(features), self.velocity(features)], dim=1)


class PlainStep(nn.Module):
    """The same with ordinary convolutions."""

    def __init__(self, channels: int = 13) -> None:
        super().__init__()
        conv = partial(nn.Conv2d, kernel_size=3, padding=1, padding_mode="circular")
        self.body = nn.Sequential(
            conv(3, channels), nn.SiLU(), conv(channels, channels), nn.ReLU(), conv(channels, 3)
        )

    def forward(self, state: Tensor) -> Tensor:
        return state + self.body(state)


def trained(kind: str, states: Tensor, steps: int, seed: int) -> nn.Module:
    """A network that has learned one step from simulations ``[time, simulation, 3, y, x]``."""
    torch.manual_seed(seed)
    network = EquivariantStep() if kind == "p8" else PlainStep()
    before, after = states[:-1].flatten(0, 1).float(), states[1:].flatten(0, 1).float()
    scale = (after - before).pow(2).mean().sqrt()

    def batch() -> tuple[Tensor, Tensor]:
        chosen = torch.randperm(len(before))[:16]
        return before[chosen], after[chosen]

    def loss(found: Tensor, wanted: Tensor) -> Tensor:
        return functional.mse_loss(found / scale, wanted / scale)

    fit(network, batch, loss, steps, RATES[kind])
    return network


@torch.no_grad()
def run_freely(network: nn.Module, state: Tensor, steps: int) -> Tensor:
    """The state and what the network makes of it, step after step."""
    states = [state.float()]
    for _ in range(steps):
        states.append(network(states[-1]))
    return torch.stack(states)


def quarter_turn(state: Tensor) -> Tensor:
    """The whole state a quarter turn further: the arrows turn with the sea."""
    scalar, vector = state[:, :1], state[:, 1:]
    turned = transform(scalar, "p4", 1), transform(vector, "p4", 1, kind="vector")
    return torch.cat(turned, dim=1)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


# -------------------------------------------------------------------------------- the claims


def compare(steps: int, seeds: int) -> tuple[dict[str, Any], dict[str, nn.Module]]:
    """Train and run both networks; errors relative to the truth, averaged over seeds.

    Returns the figures, and the networks of the last seed.
    """
    training = simulated(swell(24, DIRECTIONS[0], seed=0), FREE_STEPS)
    truth = {angle: simulated(swell(8, angle, seed=1), FREE_STEPS) for angle in DIRECTIONS}
    results: dict[str, Any] = {"steps": steps, "seeds": seeds, "networks": {}}
    networks: dict[str, nn.Module] = {}
    for kind in NAMES:
        errors: dict[str, list[list[float]]] = {str(angle): [] for angle in DIRECTIONS}
        symmetry = []
        for seed in range(seeds):
            network = networks[kind] = trained(kind, training, steps, seed)
            for angle, wanted in truth.items():
                found = run_freely(network, wanted[0], FREE_STEPS)
                pairs = zip(found[1:], wanted[1:], strict=True)
                errors[str(angle)].append([relative(a, b) for a, b in pairs])
            start = truth[0][0]
            with torch.no_grad():
                turned_first = network(quarter_turn(start.float()))
                turned_last = quarter_turn(network(start.float()))
            symmetry.append(relative(turned_first, turned_last))
        results["networks"][kind] = {
            "parameters": parameters(network),
            "errors": {
                angle: np.mean(found, axis=0).round(5).tolist() for angle, found in errors.items()
            },
            "quarter_turn": float(f"{np.mean(symmetry):.2g}"),
        }
    return results, networks


def table(results: dict[str, Any]) -> str:
    waves = " | ".join(f"waves at {angle}°: 1 / {FREE_STEPS} steps" for angle in DIRECTIONS)
    lines = [
        f"| network | parameters | {waves} | quarter turn |",
        "|---|---|" + "---|" * (len(DIRECTIONS) + 1),
    ]
    for kind, found in results["networks"].items():
        errors = [
            f"{steps[0]:.3f} / {steps[-1]:.2f}"
            for steps in (found["errors"][str(angle)] for angle in DIRECTIONS)
        ]
        lines.append(
            f"| {NAMES[kind]} | {found['parameters']:,} | {' | '.join(errors)} "
            f"| {found['quarter_turn']:.0e} |"
        )
    lines += ["", f"(Relative errors, 8 seas each, mean of {results['seeds']} seeds.)"]
    return "\n".join(lines)


def draw(results: dict[str, Any], networks: dict[str, nn.Module]) -> Figure:
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.05))
    truth = simulated(swell(1, 45, seed=1), FREE_STEPS)
    shown = {"truth": truth}
    shown |= {k: run_freely(n, truth[0], FREE_STEPS) for k, n in networks.items()}
    columns = [("start", truth[:1]), *shown.items()]
    for axis, (kind, states) in zip(above.subplots(1, 4), columns, strict=True):
        height = states[-1, 0, 0]
        axis.imshow(height, cmap="RdBu_r", vmin=-0.35, vmax=0.35, interpolation="bicubic")
        name = {"start": "height at the start", "truth": f"truth, {FREE_STEPS} steps later"}
        axis.set_title(name.get(kind, NAMES.get(kind)), fontsize=10)
        axis.set_axis_off()
    above.suptitle("waves at 45°, which neither network has seen", fontsize=11)
    charts = below.subplots(1, len(DIRECTIONS), sharey=True)
    for chart, angle in zip(charts, DIRECTIONS, strict=True):
        for kind, found in results["networks"].items():
            errors = found["errors"][str(angle)]
            steps = range(1, len(errors) + 1)
            chart.plot(steps, errors, "o-", ms=3.5, color=COLOURS[kind], label=NAMES[kind])
        chart.set_yscale("log")
        chart.set_title(f"waves at {angle}°" + (" (trained on)" if angle == 0 else ""), fontsize=10)
        chart.set_xlabel("steps")
        chart.set_xticks(range(2, FREE_STEPS + 1, 2))
        chart.grid(color="0.9")
        chart.spines[["top", "right"]].set_visible(False)
    charts[0].set_ylabel("relative error")
    charts[0].legend(frameon=False, fontsize=9)
    return figure


def main() -> None:
    options = arguments((__doc__ or "").splitlines()[0], steps=300, seeds=1)
    results, networks = compare(options.steps, options.seeds)
    publish("waves", draw(results, networks), results, table(results), options)


if __name__ == "__main__":
    main()
