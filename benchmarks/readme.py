"""Write the tables of the README and of docs/ from the results of the benchmarks, or check them.

python benchmarks/readme.py           rewrite what stands between the markers
python benchmarks/readme.py --check   exit with 1 if a file says anything else
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from econv import records, report
from econv.weights import Weights

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
WEIGHTS = "weights"  # what was published
RECORDS = "records"  # in the place of a file of results: what was trained

# Rows of the table, as the benchmark calls them and as a reader should.
ROWS = {
    "escnn R2Conv 5×5": "escnn R2Conv, 5×5",
    "e2cnn R2Conv 5×5": "e2cnn R2Conv, 5×5",
    "central 5×5": "econv, the paper's central differences, 5×5",
    "isotropic 5×5": "**econv, isotropic stencils, 5×5 (default)**",
    "isotropic 7×7": "econv, isotropic stencils, 7×7",
}

# Columns, in this order; the versions come from the results.
LIBRARIES = {"econv": "**econv**", "escnn": "escnn", "e2cnn": "e2cnn"}
CONTROL = "torch"
LONGEST_MESSAGE = 120

# The kernels of a training step, as profilers call them now and in older records.
KERNELS = {
    "layer and adjoint": ("forward",),
    "weight gradient": ("weight_gradient", "gram"),
    "spectra": ("analyse",),
    "packed gradients": ("pack", "lay"),
    "largest numbers": ("largest",),
}


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [
        "|" + "|".join(f" {cell} " if cell != "---" else cell for cell in row) + "|"
        for row in lines
    ]


def equivariance_table(found: dict[str, Any]) -> str:
    smoothness = found["settings"]["smoothness"]
    head = ["smoothness of the image, pixels", *(f"{s:g}" for s in smoothness)]
    rows = [
        [text, *(f"{error:.2g}" for error in found["one_layer"]["errors"][name])]
        for name, text in ROWS.items()
        if name in found["one_layer"]["errors"]
    ]
    fields = found["one_layer"]["fields"]
    note = (
        f"({fields}→{fields} fields of 8 orientations, mean over {found['settings']['seeds']} "
        f"seeds; {code(found)}; `benchmarks/equivariance.py`.)"
    )
    return "\n".join([*table(head, rows), "", note])


def equivariance_in_short(found: dict[str, Any], trained: list[report.Row]) -> str:
    """One layer of each library, by how smooth the image is; and trained networks, in words."""
    errors = found["one_layer"]["errors"]
    columns = {"escnn": "escnn R2Conv 5×5", "e2cnn": "e2cnn R2Conv 5×5", "econv": "isotropic 5×5"}
    known = {text: errors[name] for text, name in columns.items() if name in errors}
    rows = [
        [f"{smooth:g}", *(f"{row[place]:.2g}" for row in known.values())]
        for place, smooth in enumerate(found["settings"]["smoothness"])
    ]
    rows = [[*row[:-1], f"**{row[-1]}**"] for row in rows]
    note = (
        f"Relative error of 5×5 filters, mean over {found['settings']['seeds']} seeds: "
        "[how it was measured, and more](docs/results.md#equivariance)."
    )
    complete = {row.recipe.name: row for row in trained if row.complete}
    if {"mnist_upright_p8", "mnist_upright_cnn"} <= complete.keys():
        ours, cnn = (
            statistics.mean(r.test_error for r in complete[f"mnist_upright_{name}"].records)
            for name in ("p8", "cnn")
        )
        note += (
            " Whole networks, trained on upright digits and tested on digits at every angle: an "
            f"ordinary CNN errs by {cnn:.0f} %, ours by **{ours:.1f} %**: "
            "[results](docs/results.md#accuracy); smaller ones "
            "[beside escnn's](docs/results.md#digits-at-every-angle-by-library)."
        )
        if complete["mnist_upright_p8"].changed:
            note += " Our settings were changed once a test error had been seen."
    return "\n".join([*table(["smoothness in pixels", *known], rows), "", note])


# Rows of the README: recipes, and what they are called there.
ACCURACY = {
    "mnist_rot_p8": "MNIST-rot",
    "mnist_rot_p8_large": "MNIST-rot, augmented",
    "cifar10_resnet26_p6m": "CIFAR-10, small network",
    "cifar10_resnet26_p8": "CIFAR-10, large network",
}


def errors(row: report.Row) -> list[float]:
    """The test errors of its runs."""
    return [record.test_error for record in row.records]


def lower(row: report.Row) -> bool:
    """Whether ours is below the paper's error, by more than its deviation."""
    return statistics.mean(errors(row)) + statistics.stdev(errors(row)) < row.recipe.paper_error


def accuracy_in_short(found: list[report.Row]) -> str:
    """The paper's error and ours, where all seeds are there; bold where ours is clearly lower."""
    by_name = {row.recipe.name: row for row in reversed(found) if row.complete}
    kept = {words: by_name[name] for name, words in ACCURACY.items() if name in by_name}
    rows = [
        [
            words,
            f"{row.recipe.paper_error:.3f}".removesuffix("0"),
            ("**{}**" if lower(row) else "{}").format(report.spread(errors(row))),
        ]
        for words, row in kept.items()
    ]
    seeds = min((row.seeds for row in kept.values()), default=0)
    times = max((row.data for row in kept.values()), default=1)
    made = ", for most of its runs anew" * (times > 1)
    note = (
        f"Mean and deviation over {seeds} seeds, bold where lower by more than that; MNIST-rot is "
        f"re-created{made}, and the test split is read once: [all tables]"
        "(docs/results.md#accuracy). The recipes are not the paper's: "
        "[what differs](docs/paper.md)."
    )
    if changed := [words for words, row in kept.items() if row.changed]:
        note += f" Settings were changed after a test error had been seen: {' and '.join(changed)}."
    return "\n".join([*table(["test error, %", "paper", "econv"], rows), "", note])


def speed_in_short(cpu: dict[str, Any], gpu: dict[str, Any], networks: dict[str, Any]) -> str:
    """Training steps, dense and by the engines: layers on both devices, a network on the GPU."""
    rows = []
    for found, where in ((cpu, f"{cpu['threads']} CPU cores"), (gpu, gpu["device"])):
        for group in ("p8", "p16"):
            layer = next(each for each in found["layers"] if each["case"]["group"] == group)
            times = isolated(layer["forward+backward"])["median"]
            case = layer["case"]
            name = f"layer of {group}, {case['in_fields']} fields, {where}"
            rows.append([name, times["dense"], times["spectral"]])
    for run in networks["runs"]:
        if run["recipe"].startswith("cifar10_resnet26_p8_paper"):
            speed = run["images_per_second"]
            name = f"ResNet-26 of the paper, {networks['device']}"
            rows.append([name, run["batch"] / speed["dense"], run["batch"] / speed["auto"]])
    cells = [[name, f"{1e3 * a:.3g}", f"**{1e3 * b:.3g}**"] for name, a, b in rows]
    note = (
        "Medians. On the CPU in float32; on the GPU in bfloat16, layers as CUDA graphs, each "
        "engine by itself. Where a layer gains nothing, econv runs `conv2d`: "
        "[all figures](docs/results.md#speed)."
    )
    return "\n".join([*table(["ms for a training step", "dense", "econv"], cells), "", note])


def library_names(versions: dict[str, dict[str, str] | None]) -> list[str]:
    """The heads of the columns: with versions, without where the library is the project itself."""
    return [
        words if name == "econv" else f"{words} {(versions.get(name) or {}).get(name, '')}".strip()
        for name, words in LIBRARIES.items()
    ]


def compatibility_summary(found: dict[str, Any]) -> str:
    """How many checks of each topic a library passes."""
    libraries = found["libraries"]
    topics: dict[str, list[str]] = {}
    for check in found["checks"]:
        topics.setdefault(check["topic"], []).append(check["name"])

    def passed(library: str, names: list[str]) -> str:
        if libraries.get(library, {}).get("versions") is None:
            return "not installed"
        statuses = [libraries[library]["results"][name]["status"] for name in names]
        return f"{statuses.count('pass')} of {len(statuses) - statuses.count('absent')}"

    names = [check["name"] for check in found["checks"]]
    heads = library_names({name: column["versions"] for name, column in libraries.items()})
    rows = [
        [topic, *(passed(library, listed) for library in LIBRARIES)]
        for topic, listed in topics.items()
    ]
    rows.append(["**all checks**", *(f"**{passed(library, names)}**" for library in LIBRARIES)])
    counts = (str(len(causes_of(found, library))) for library in LIBRARIES)
    rows.append(["causes of what fails", *counts])
    note = (
        "(The same p8 network in each library, every check in a fresh process; an ordinary CNN, "
        f"the control, passes {passed(CONTROL, names)}. `benchmarks/compatibility.py`; each check "
        "and each error: [Compatibility](compatibility.md).)"
    )
    return "\n".join([*table(["", *heads], rows), "", note])


# What lies behind the failures of escnn and e2cnn: a pattern for "check: message", and the cause.
CAUSES = {
    "filters are cached in eval mode, as its documentation says; call `.train()` before states are "
    "saved, loaded, copied or changed": r"functional_call_eval|deepcopy_eval|same_state|"
    r"loads_across|live_weights|learns_in_eval|parametrised_eval",
    "orientation pooling writes to memory of its own making: it loses dtype and layout, and vmap "
    "refuses it": r"pooling_dtype|pooling_layout|func_vmap|per_sample_gradients: .*vmap",
    "layers look into their numbers while they run, which compilers and exporters cannot follow": (
        r"compiled|graph_breaks|torch_export|onnx_dynamo|func_grad|per_sample_gradients"
    ),
    "new batch sizes are compiled anew": r"recompilations",
    "groups hold functions that pickle does not know; save the state dict instead": (
        r".*Can't pickle"
    ),
    "the export leaves its own pooling of channels in the network": r"plain_export",
    "layers share the arrays of their bases, and convert them for all": r"dtype_of_others",
    "batch norm has no conversion to a synchronised one": r"synchronised",
    "a plain tensor ends in an assertion without a word": r"plain_tensors",
}


def cause_of(check: str, message: str) -> str:
    """What lies behind a failure, or its message where nobody has looked."""
    text = f"{check}: {message}"
    own = message.replace("`", "'").replace("|", "\\|")
    return next((cause for cause, pattern in CAUSES.items() if re.match(pattern, text)), own)


def causes_of(found: dict[str, Any], library: str) -> dict[str, list[str]]:
    """The failures of a library by what lies behind them, as titles of the checks."""
    results = found["libraries"].get(library, {}).get("results", {})
    causes: dict[str, list[str]] = {}
    for check in found["checks"]:
        result = results.get(check["name"], {"status": "absent"})
        if result["status"] == "fail":
            cause = cause_of(check["name"], result["message"])
            causes.setdefault(cause, []).append(check["title"])
    return causes


def compatibility_causes(found: dict[str, Any]) -> list[str]:
    """A table of causes, with how many checks fail for each."""
    by_library = {name: causes_of(found, name) for name in LIBRARIES}
    every = list(dict.fromkeys(cause for causes in by_library.values() for cause in causes))
    order = {cause: place for place, cause in enumerate(CAUSES)}
    every.sort(key=lambda cause: order.get(cause, len(order)))
    rows = [
        [cause, *(str(len(causes.get(cause, []))) for causes in by_library.values())]
        for cause in every
    ]
    rows.append(["**causes**", *(f"**{len(causes)}**" for causes in by_library.values())])
    versions = {name: column["versions"] for name, column in found["libraries"].items()}
    heads = library_names(versions)
    return ["## What fails, by cause", "", *table(["checks that fail because", *heads], rows), ""]


def compatibility_details(found: dict[str, Any]) -> str:
    """Causes, then every check, with the first line of its error where it fails."""
    libraries = found["libraries"]

    def cell(library: str, check: str) -> str:
        if libraries.get(library, {}).get("versions") is None:
            return "not installed"
        result = libraries[library]["results"][check]
        message = result["message"].replace("`", "'").replace("|", "\\|")
        if len(message) > LONGEST_MESSAGE:
            message = message[: LONGEST_MESSAGE - 2].rstrip("\\") + " …"
        if result["status"] == "fail":
            return f"**fail** `{message}`"
        status = "pass" if result["status"] == "pass" else "–"
        return f"{status} ({message})" if message else status

    heads = library_names({name: column["versions"] for name, column in libraries.items()})
    lines = compatibility_causes(found)
    for topic in dict.fromkeys(check["topic"] for check in found["checks"]):
        rows = [
            [check["title"], *(cell(library, check["name"]) for library in LIBRARIES)]
            for check in found["checks"]
            if check["topic"] == topic
        ]
        lines += [f"## {topic}", "", *table(["", *heads], rows), ""]
    for name, column in libraries.items():
        known = column["versions"] or {}
        listed = ", ".join(f"{package} {version}" for package, version in known.items() if version)
        when = f"; {code(column)}, {column['finished'][:10]}" if known else ""
        name = "control" if name == CONTROL else name
        lines.append(f"- {name}: {listed or 'not installed'}{when}")
    return "\n".join(lines)


def costs_table(found: dict[str, Any]) -> str:
    """Import, construction, checkpoint and layer time."""
    columns = [*LIBRARIES, CONTROL]

    def row(words: str, values: dict[str, Any], text: Callable[[Any], str]) -> list[str]:
        cells = (text(values[name]) if name in values else "not installed" for name in columns)
        return [words, *cells]

    def seconds(value: float) -> str:
        return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"

    def sizes(kept: dict[str, int]) -> str:
        modes = (kept[f"{mode}_bytes"] / kept["parameter_bytes"] for mode in ("train", "eval"))
        return " / ".join(f"{ratio:.2f}" for ratio in modes)

    def ratios(layer: dict[str, Any]) -> str:
        chosen = (layer["contiguous_format"][what] for what in ("forward+backward", "eval"))
        return " / ".join(f"{passes['ratio']:.2f}" for passes in chosen)

    settings = found["settings"]
    widths, fields = settings["widths"], settings["fields"]
    imported = {name: s for name, s in found["import_s"].items() if name != CONTROL}
    rows = [
        [*row("import, after torch's", imported, seconds)[:-1], "–"],
        row(
            f"build {len(widths)} layers, {min(widths)}–{max(widths)} fields",
            found["build_s"],
            seconds,
        ),
        row("checkpoint over its parameters, train / eval mode", found["checkpoint"], sizes),
        row(f"layer {fields}→{fields} over plain Conv2d, training / eval", found["layer"], ratios),
    ]
    note = (
        f"({settings['group']}, 5×5, CPU, {settings['threads']} thread, batch {settings['batch']}, "
        f"{settings['size']}×{settings['size']}; medians, interleaved in one run; {code(found)}; "
        "`benchmarks/build_and_size.py`.)"
    )
    heads = [*library_names(found["versions"]), "ordinary CNN"]
    return "\n".join([*table(["", *heads], rows), "", note])


def conversion_table(found: dict[str, Any]) -> str:
    """A network and its converted version at every angle: mean ± deviation over the seeds."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        if "tried" not in row:
            runs.setdefault(row["network"], []).append(row)

    def percent(values: list[float]) -> str:
        mean = f"{statistics.mean(values):.1f}"
        return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean

    angles = {"upright": "0", "turned by 90°": "90", "by 45°": "45"}
    runs = {name: runs[name] for name in sorted(runs, key=lambda name: (name != "source", name))}
    rows = [
        [
            name,
            f"{same[0]['parameters']:,}",
            *(percent([row["error_percent"][angle] for row in same]) for angle in angles.values()),
            percent([row["mean"] for row in same]),
        ]
        for name, same in runs.items()
        if "epoch" not in name
    ]
    count = len(runs["source"][0]["error_percent"])
    chosen = "was chosen on these test digits, by the first seed"
    if any("tried" in row for row in found["rows"]):
        chosen = "of each was chosen by a quarter of the training digits, upright, and one seed"
    seeds = min(map(len, runs.values()))
    note = (
        f"(Test error in %, {found['training_images']:,} upright digits of MNIST, "
        f"on a margin of {found['arguments']['margin']} pixels, "
        f"{found['arguments']['epochs']} epochs, no augmentation, {seeds} "
        f"seed{'s' * (seeds > 1)}; "
        f"{code(found)}; `benchmarks/convert_and_rotate.py`. The learning rate {chosen}.)"
    )
    head = ["trained on upright digits", "parameters", *angles, f"mean of {count} angles"]
    return "\n".join([*table(head, rows), "", note])


def every_angle_table(found: dict[str, Any]) -> str:
    """Upright digits learned, turned digits told, by library."""
    rows = [(*row["key"], row) for row in found["rows"]]
    names = list(dict.fromkeys(name for what, name, _, _, _ in rows if what == "test"))
    twin = next(name for name in names if "CNN" in name)
    step = {name: row["step"] for what, name, _, _, row in rows if what == "time"}

    def cells(name: str) -> list[str]:
        same = [row for what, of, _, _, row in rows if (what, of) == ("test", name)]
        by_angle = [list(row["error_percent"].values()) for row in same]
        upright = [row["error_percent"]["0"] for row in same]
        diagonal = [row["error_percent"]["45"] for row in same]
        means, worst = list(map(statistics.mean, by_angle)), list(map(max, by_angle))
        turned = [row["full_turn"] for row in same]
        errors = [upright, diagonal, means, worst, turned]
        time = f"{step[name] / step[twin]:.1f}×" if name in step else "–"
        parameters = f"{same[0]['parameters']:,}"
        return [name, parameters, *(f"{statistics.mean(e):.1f}" for e in errors), time]

    seeds = len({seed for what, _, seed, _, _ in rows if what == "test"})
    version = found["layout"].get("escnn, C8")
    note = (
        f"(Test error in %, {found['arguments']['images']:,} upright digits of MNIST, "
        f"{found['arguments']['epochs']} epochs, no augmentation, mean of {seeds} "
        f"seed{'s' * (seeds > 1)}"
        f"{f'; escnn {version}' if version else ''}; steps on one thread, over the CNN's; the "
        "learning rate was chosen by a thousand other upright digits; "
        f"{code(found)}; `benchmarks/every_angle.py`. The settings of econv's network had been "
        "chosen on digits of the same kind, those of escnn's are its documentation's.)"
    )
    count = len(found["angles"])
    head = ["network", "parameters", "upright", "by 45°", f"mean of {count} angles", "worst"]
    head += ["upright, after a full turn in steps", "training step"]
    return "\n".join([*table(head, [cells(name) for name in names]), "", note])


def pretrained_table(found: dict[str, Any]) -> str:
    """A trained network and its conversions: upright, turned, and how long each took."""
    settings = found["arguments"]
    epochs = settings["tuning"]
    names = {
        "source": "the source",
        "p1, filters": "p1, its filters",
        "p1, images": "p1, fitted to images",
        "p4, filters": "p4, its filters",
        "p4, images": "p4, fitted to images",
        "p4, fine-tuned": f"the same, fine-tuned for {epochs} epoch{'s' * (epochs > 1)}",
    }
    rows = []
    for name, words in names.items():
        same = [row for row in found["rows"] if row["network"] == name]
        by_angle = [row["accuracy_percent"] for row in same]
        turned = [statistics.mean(of[a] for a in ("90", "180", "270")) for of in by_angle]
        rows.append(
            [
                words,
                f"{statistics.mean(of['0'] for of in by_angle):.1f}",
                f"{statistics.mean(turned):.1f}",
                f"{statistics.mean(row['seconds'] for row in same):.0f} s",
            ]
        )
    seeds = len({row["seed"] for row in found["rows"]})
    note = (
        f"(Accuracy in % on 1,000 digits of {settings['side']}² pixels, {seeds} "
        f"seed{'s' * (seeds > 1)}, {settings['fitted']} images to fit to; seconds on one core that "
        "was shared; `benchmarks/pretrained.py`.)"
    )
    head = ["network", "upright", "turned by quarters", "made in"]
    return "\n".join([*table(head, rows), "", note])


def device_tests(found: dict[str, Any] | None) -> str:
    """How the tests ended on a GPU."""
    if found is None:
        return "There is no record of such a run yet."
    kinds = ("passed", "failed", "skipped")
    sums = {kind: sum(count[kind] for count in found["files"].values()) for kind in kinds}
    known = found["versions"]
    failures = found["failures"]
    failed = f"**{len(failures)} failed**" if failures else "none failed"
    text = (
        f"{found['device']}, with torch {known['torch']}, Triton {known['triton']} and Python "
        f"{known['python']}, {code(found)}, {found['finished'][:10]}: {sums['passed']} passed, "
        f"{failed}, {sums['skipped']} skipped."
    )
    rows = [
        [f"`{file}`", *(str(count[kind]) for kind in kinds), f"{count['seconds']:.0f}"]
        for file, count in found["files"].items()
    ]
    reasons = [f"- skipped {n} times: {reason}" for reason, n in found["skips"].items()]
    lines = [text, "", *table(["", *kinds, "seconds"], rows), ""]
    lines += [*reasons, *(f"- failed: `{name}`" for name in failures)]
    if failures:
        lines += ["", "What failed may have been put right since: later code has not run there."]
    return "\n".join(lines).rstrip()


def faults(found: dict[str, Any]) -> str:
    """Of the faults that were put into the code, how many a test found."""
    share = found["found"] / found["listed"]
    missed = f", {len(found['missed'])} were missed" * bool(found["missed"])
    return (
        f"Last whole run of `make mutants`: {found['found']} of {found['listed']} faults found "
        f"({100 * share:.1f} %){missed}; {len(found['survivors'])} survive, each with its reason "
        f"({code(found)}, {found['finished'][:10]})."
    )


def layer_name(case: dict[str, Any]) -> str:
    fields = f"{case['in_fields']}→{case['out_fields']}"
    return f"{case['group']}, {fields}, batch {case['batch']}, {case['size']}×{case['size']}"


def ratio(times: dict[str, float]) -> str:
    return f"{times['dense'] / times['spectral']:.2f}"


def cpu_layers(found: dict[str, Any]) -> str:
    """The layers of the CPU: dense over spectral."""
    rows = [
        [
            layer_name(layer["case"]),
            ratio(layer["forward"]["median"]),
            f"**{ratio(layer['forward+backward']['median'])}**",
            " / ".join(f"{layer['peak_bytes'][e] / 1e6:.0f}" for e in ("dense", "spectral")),
        ]
        for layer in found["layers"]
    ]
    head = ["layer, float32", "forward", "forward+backward", "peak MB, dense / spectral"]
    note = f"(dense / spectral; {found['threads']} threads, torch {found['torch']}; "
    note += "`benchmarks/engines.py --threads 2`.)"
    return "\n".join([*table(head, rows), "", note])


def isolated(times: dict[str, Any]) -> dict[str, Any]:
    """What was measured in isolation."""
    found: dict[str, Any] = times.get("isolated") or times
    return found


def gpu_layers(found: dict[str, Any]) -> str:
    """The layers of the GPU: dense over spectral, "auto" over the better, memory and errors."""
    rows = []
    for layer in found["layers"]:
        both, errors = layer["forward+backward"], layer["errors"]
        worst = max(errors["spectral"][name] / error for name, error in errors["dense"].items())
        peaks = (layer["peak_bytes"][engine] / 1e6 for engine in ("dense", "spectral"))
        over = layer.get("auto_over_better")
        compiled = both.get("compile")
        rows.append(
            [
                layer_name(layer["case"]),
                ratio(layer["forward"]["median"]),
                ratio(both["median"]),
                f"{ratio(both['graph'])} / **{ratio(isolated(both)['median'])}**",
                ratio(compiled["median"]) if compiled else "–",
                f"{over['graph']:.2f} / {over['compile']:.2f}" if over else "–",
                " / ".join(f"{peak:.0f}" for peak in peaks),
                f"{worst:.2f}",
            ]
        )
    head = ["layer, bfloat16", "forward", "forward+backward", "CUDA graphs, interleaved / isolated"]
    head += ["compiled", "auto over the better, graph / compiled", "peak MB, dense / spectral"]
    head += ["error over dense's"]
    note = (
        f"(Time of dense over that of spectral; {found['device']}, torch {found['torch']}, Triton "
        f"{found['triton']}, {code(found)}; `benchmarks/engines.py --device cuda`.)"
    )
    return "\n".join([*table(head, rows), "", note])


def code(found: dict[str, Any]) -> str:
    """The revision that found a result, or the day on which what does not know it was committed."""
    commit, changed, _ = found.get("origin", found)["revision"].partition("+")
    if commit == "unknown":
        return f"code of unknown revision, result committed on {found['committed']}"
    return f"code of revision {commit[:12]}" + " with changes" * bool(changed)


def gpu_fused(found: dict[str, Any]) -> str:
    """Norm, ReLU and layer, one after the other and fused."""
    rows = []
    for layer in found["layers"]:
        if after := layer.get("after_norm_and_relu"):
            times, ways = isolated(after)["median"], ("dense", "spectral", "fused")
            cells = [f"{times['dense'] / times[way]:.2f}" for way in ways[1:]]
            cells.append(" / ".join(f"{after['peak_bytes'][way] / 1e6:.0f}" for way in ways))
            rows.append([layer_name(layer["case"]), *cells])
    if not rows:
        return ""
    head = ["norm, ReLU, layer, bfloat16", "spectral", "spectral, fused"]
    head += ["peak MB, dense / spectral / fused"]
    note = (
        "(Speed over the dense engine's, training steps as CUDA graphs, isolated; "
        f"{found['device']}, {code(found)}; `benchmarks/engines.py --device cuda`.)"
    )
    return "\n".join([*table(head, rows), "", note])


def gpu_kernels(found: dict[str, Any]) -> str:
    """Where the time of a training step of a layer goes."""
    rows = []
    for layer in found["layers"]:
        ours, dense = (layer["kernels"][engine] for engine in ("spectral", "dense"))
        named = [sum(ours.get(name, 0.0) for name in names) for names in KERNELS.values()]
        cells = [*named, sum(ours.values()) - sum(named), sum(ours.values()), sum(dense.values())]
        rows.append([layer_name(layer["case"]), *(f"{cell:.0f}" for cell in cells)])
    head = ["µs", *KERNELS, "rest", "in all", "dense, in all"]
    note = f"({found['device']}, {code(found)}; `benchmarks/engines.py --device cuda`.)"
    return "\n".join([*table(head, rows), "", note])


WAYS = {"compile": "`torch.compile`", "graph": "CUDA graph", "eager": "eager"}


def networks(found: dict[str, Any] | None) -> str:
    """Training steps of whole networks: the source, and converted."""
    rows = []
    for row in found["rows"] if found else ():
        times = row.get("median", {})
        if not {"source", "auto"} <= times.keys():
            continue
        device = {name: sum(one["ms"].values()) for name, one in row.get("profile", {}).items()}
        chosen = (f"{count} × {name}" for name, count in row["chosen"]["auto"].items())
        rows.append(
            [
                f"{row['network'].partition(',')[0]}, {row['match']}",
                WAYS[row["way"]],
                *(milliseconds(times.get(name)) for name in COLUMNS),
                f"**{times['auto'] / times['source']:.2f}**",
                f"{times['auto'] / times['dense']:.2f}" if "dense" in times else "–",
                f"{device['auto'] / device['source']:.2f}" if "source" in device else "–",
                ", ".join(chosen),
            ]
        )
    if found is None or not rows:
        return ""
    head = ["network, kept", "step", *(f"{name}, ms" for name in COLUMNS), "auto / source"]
    head += ["auto / dense", "auto / source, device's work alone", "auto chose"]
    size = f"batch {found['batch']}, {found['size']}×{found['size']}"
    note = (
        f"(Converted to {found['group']}; {size}, {found['precision']}, isolated; "
        f"{found['device']}, {code(found)}; `benchmarks/networks.py`.)"
    )
    return "\n".join([*table(head, rows), "", note])


COLUMNS = ("source", "dense", "auto")


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def time_of_networks(found: dict[str, Any] | None, before: dict[str, Any] | None = None) -> str:
    """Where the time of compiled training steps goes, now and in a record from before."""
    rows, kinds = [], []
    for record, when in ((found, ""), (before, ", before")):
        for row in record["rows"] if record else ():
            for name, profile in row.get("profile", {}).items():
                if when and name == "source":  # which is what it was
                    continue
                kinds = list(profile["ms"])
                each = (*profile["ms"].values(), sum(profile["ms"].values()))
                label = f"{row['network'].partition(',')[0]}, {row['match']}"
                rows.append([label, name + when, *(f"{ms:.2f}" for ms in each)])
    if found is None or not rows:
        return ""
    rows.sort(key=lambda row: (row[0], row[1] != "source", "before" not in row[1]))
    earlier = f"; before: {code(before)}, when compiled graphs were dense" if before else ""
    note = (
        f"(Milliseconds of kernels in a compiled training step, {found['precision']}; "
        f"{found['device']}, {code(found)}{earlier}; `benchmarks/networks.py --profile`.)"
    )
    return "\n".join([*table(["network, kept", "", *kinds, "in all"], rows), "", note])


def training_speed(found: dict[str, Any]) -> str:
    """Whole training steps with each engine."""
    rows = []
    for run in found["runs"]:
        speed = run["images_per_second"]
        rows.append(
            [
                run["recipe"].partition("+")[0],
                ", ".join(run["operators"]),
                f"{run['parameters']:,}",
                str(run["batch"]),
                *(f"{each:,.0f}" if each >= 100 else f"{each:.1f}" for each in speed.values()),
                *(f"{speed[engine] / speed['dense']:.2f}" for engine in ("spectral", "auto")),
            ]
        )
    head = ["recipe", "operators", "parameters", "batch", *found["runs"][0]["images_per_second"]]
    head += ["spectral / dense", "auto / dense"]
    codes: dict[str, list[str]] = {}
    for run in found["runs"]:
        codes.setdefault(code({**found, **run}), []).append(run["recipe"].partition("+")[0])
    by = "; ".join(
        of if len(codes) == 1 else f"{' and '.join(names)}: {of}" for of, names in codes.items()
    )
    note = (
        f"(Images a second, and over the dense engine's; {found['device']}, "
        f"{found['precision']}, {by}; `benchmarks/training_speed.py`.)"
    )
    return "\n".join([*table(head, rows), "", note])


def zoo(found: dict[str, Any]) -> str:
    """Every network that was tried, package by package; what was refused with its sentence."""
    rows = []
    for row in found["rows"]:
        name = row["key"].replace("|", "\\|") + (
            " (backbone)" if row.get("of") == "backbone" else ""
        )
        cost = [f"{row[kind]:,}" if kind in row else "–" for kind in ("seconds", "megabytes")]
        if row["outcome"] == "converts":
            shapes = "" if row["same_shapes"] else ", **other shapes**"
            rows.append([name, *cost, f"{row['forward_ratio']:.2f}", f"{row['error']:.0e}{shapes}"])
        else:
            sentence = row["sentence"].replace("|", "\\|").replace("`", "'")
            rows.append([name, *cost, "–", f"{row['outcome']}: {sentence}"])
    total = found["summary"]
    head = ["network", "seconds", "MB", "forward / source", "error at a quarter turn"]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items() if number)
    note = (
        f"({total['of_these_convert']} of {total['without_attention']} networks without attention "
        f'convert; to {found["group"]}, `match="{found["match"]}"`; {versions}; torch '
        f"{found['torch']}, {found['threads']} thread(s), {code(found)}; `benchmarks/zoo.py`.)"
    )
    return "\n".join([*table(head, rows), "", note])


def _best(rows: list[dict[str, Any]], **wanted: Any) -> str:
    """The rate with the lowest loss, and that loss; a dash where nothing was measured."""
    found = [r for r in rows if all(r[name] == value for name, value in wanted.items())]
    finite = [r for r in found if r["loss"] is not None]
    if not finite:
        return "below the range" if found else "–"
    best = min(finite, key=lambda r: r["loss"])
    return f"{10 ** best['exponent']:.1g} ({best['loss']:.2g} ± {best['loss_std']:.1g})"


def learning_rates(found: dict[str, Any]) -> str:
    """The best rates of every network, for each task and optimiser."""
    rows = [r for r in found["rows"] if r["pool"] in (None, "max")]
    columns = [("digits", "adam"), ("digits", "sgd"), ("flow", "adam"), ("flow", "sgd")]
    names = list(dict.fromkeys(r["network"] for r in rows))
    words = {"adam": "Adam", "sgd": "SGD"}
    return "\n".join(
        table(
            ["network", *(f"{task}, {words[optimizer]}" for task, optimizer in columns)],
            [
                [name] + [_best(rows, network=name, task=task, optimizer=o) for task, o in columns]
                for name in names
            ],
        )
    )


def lag_of_norms(found: dict[str, Any]) -> str:
    """How far validation in eval mode stays behind, at one rate of Adam for all."""
    rows = [
        r
        for r in found["rows"]
        if r["optimizer"] == "adam" and r["exponent"] == -2.5 and "lag" in r and r["pool"] != "none"
    ]
    return "\n".join(
        table(
            ["network", "stays behind by", "training loss"],
            [
                [
                    r["network"],
                    f"{100 * r['lag']:.0f} ± {100 * r['lag_std']:.0f} %",
                    f"{r['loss']:.2f} ± {r['loss_std']:.2f}",
                ]
                for r in rows
                if r["pool"] in (None, "max")
            ],
        )
    )


def weights(found: list[Weights]) -> str:
    """What is published, and how large it is."""
    rows = []
    for each in found:
        size = sum(path.stat().st_size for path in each.folder.iterdir()) / 1e6
        images = each.dataset + ", re-created" * each.recreated
        error = f"{each.metrics['test_error']:.2f}"
        row = [f"`{each.name}`", f"`{each.model}`", f"{each.parameters:,}", images, error]
        rows.append([*row, each.dtype, f"{size:.2f}"])
    head = ["weights", "network", "parameters", "data", "test error, %", "stored as", "MB"]
    return "\n".join(table(head, rows))


def heads(found: dict[str, Any]) -> str:
    """The best rate and loss of one narrow network, by what its head pools to."""
    rows = [r for r in found["rows"] if r["network"] == "p8, 3 fields" and r["pool"]]
    pools = list(dict.fromkeys(r["pool"] for r in rows))
    head = ["`pool=`, p8, 3 fields, digits", "Adam's best rate (training loss)"]
    own = {"task": "digits", "optimizer": "adam"}
    return "\n".join(table(head, [[f"`{p}`", _best(rows, pool=p, **own)] for p in pools]))


def small(errors: list[float]) -> str:
    """Errors at each smoothness, to the digits that seeds agree on."""
    return " / ".join(f"{error:.4f}".lstrip("0") for error in errors)


def depth_by_activation(found: dict[str, Any]) -> str:
    """Errors after six layers, by what follows each of them."""
    rows = found["errors_by_activation"]
    functions = list(next(iter(rows.values())))
    cells = [[name, *(small(row[each]) for each in functions)] for name, row in rows.items()]
    return "\n".join([*table(["", *functions], cells), "", depth_note(found)])


def depth_by_halving(found: dict[str, Any]) -> str:
    """The same where maps are halved twice on the way."""
    rows = found["errors_by_halving"]
    columns = list(next(iter(rows.values())))
    cells = [[f"`{name}`", *(small(row[c]) for c in columns)] for name, row in rows.items()]
    return "\n".join([*table(["", *columns], cells), "", depth_note(found)])


def depth_note(found: dict[str, Any]) -> str:
    used = found["settings"]
    told = " / ".join(f"{sigma:g}" for sigma in used["smoothness"])
    return (
        f"(Error at {used['degrees']}° after {used['depth']} layers of {used['group']} with norms, "
        f"on fields of σ = {told} pixels; mean of {used['seeds']} networks; "
        f"{code(found['origin'])}; `benchmarks/depth.py`.)"
    )


def migrating_table(found: dict[str, Any]) -> str:
    """How far the codes of docs/migrating.md are from equivariance."""
    versions = found["versions"]
    lines = [
        f"| | escnn {versions['escnn']}, 90° | econv, 90° | escnn, 45° | econv, 45° |",
        "|---|---|---|---|---|",
    ]
    for title, row in found["codes"].items():
        both = (row[name]["errors"][angle] for angle in ("90", "45") for name in ("escnn", "econv"))
        cells = [f"{error:.1e}" for error in both]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    how = (
        f"Relative error of `y` when a smooth random image turns ({found['pixels']}², blurred by "
        f"{found['smoothness']:g} pixels, faded towards the corners, float32, untrained, mean of "
        f"{found['seeds']} seeds; `benchmarks/migrating.py`)."
    )
    return "\n".join([*lines, "", how])


def volume_errors(found: dict[str, Any]) -> str:
    """Errors in volumes at each smoothness, of one layer and of several, beside escnn's."""
    rows = found["rows"]
    cases = dict.fromkeys((row["layers"], row["size"], row["library"]) for row in rows)
    smoothness = list(dict.fromkeys(row["sigma"] for row in rows))
    head = ["layers", "size", "filters", *(f"σ = {sigma:g}" for sigma in smoothness)]
    cells = []
    for layers, size, name in sorted(cases, key=lambda case: case[:2]):  # the rest as measured
        own = {
            row["sigma"]: row["error"]
            for row in rows
            if (row["layers"], row["size"], row["library"]) == (layers, size, name)
        }
        errors = (f"{own[sigma]:.2g}" if sigma in own else "–" for sigma in smoothness)
        cells.append([str(layers), f"{size}³", name, *errors])
    note = (
        f"(Group {found['group']}, one field, volumes of {found['voxels']}³, "
        f"{found['elements'] * found['seeds']} rotations that are no symmetries of the grid; "
        f"{code(found)}; `benchmarks/volumes.py`.)"
    )
    return "\n".join([*table(head, cells), "", note])


def volume_speed(found: dict[str, Any]) -> str:
    """Steps of single layers for volumes, dense and spectral."""
    cells = []
    for row in found["rows"]:
        group, fields, batch, size = row["case"]
        times = row["seconds"]["median"]
        each = [f"{1e3 * times[name]:.0f}" for name in ("dense", "spectral")]
        ratio = f"{times['dense'] / times['spectral']:.1f}"
        cells.append([group, str(fields), f"{batch} × {size}³", *each, ratio])
    head = ["group", "fields", "volumes", "dense, ms", "spectral, ms", "times as fast"]
    note = (
        f"(Forward and backward, medians, float32, {found['origin']['threads']} threads of "
        f"{found['origin']['device']}; {code(found)}; `benchmarks/volume_engines.py`.)"
    )
    return "\n".join([*table(head, cells), "", note])


def volume_speed_on_a_gpu(found: dict[str, Any] | None) -> str:
    """Passes of single layers for volumes as CUDA graphs: dense over spectral."""
    if found is None:
        return ""
    cells = []
    for row in found["rows"]:
        group, fields, batch, size = row["case"]
        times = row["seconds"]
        dense = {
            one: min(took for name, took in each.items() if name.startswith("dense"))
            for one, each in times.items()
        }
        peaks = (f"{row['bytes'][name] / 1e6:.0f}" for name in ("dense", "spectral"))
        error = max(
            row["errors"]["spectral"][name] / other
            for name, other in row["errors"]["dense"].items()
        )
        step = "forward+backward"
        cells.append(
            [
                f"{group}, {fields}→{fields}, batch {batch}, {size}³",
                f"{dense['forward'] / times['forward']['spectral']:.2f}",
                f"**{dense[step] / times[step]['spectral']:.2f}**",
                f"{1e3 * dense[step]:.2f} / {1e3 * times[step]['spectral']:.2f}",
                " / ".join(peaks),
                f"{error:.2f}",
            ]
        )
    head = ["layer, bfloat16", "forward", "forward+backward", "ms, dense / spectral"]
    head += ["peak MB, dense / spectral", "error over dense's"]
    origin = found["origin"]
    note = (
        f"(Time of dense, the faster of cuDNN's two layouts, over that of spectral; CUDA graphs, "
        f"isolated; {origin['device']}, torch {origin['torch']}, Triton {origin['triton']}, "
        f"{code(found)}; `benchmarks/volume_engines.py --device cuda`.)"
    )
    return "\n".join([*table(head, cells), "", note])


def tetris(*found: dict[str, Any]) -> str:
    """Accuracy under all rotations: a record, and a line, for each size of stencils."""
    cells = []
    for record in found:
        own = record["runs"]
        shares = [100 * row["accuracy"] for row in own]
        pair = [100 * statistics.mean(row["each"][:2]) for row in own]
        cells.append(
            [
                f"{own[0]['size']}³",
                f"{own[0]['parameters']:,}",
                str(len(own)),
                f"{report.spread(shares)} %",
                f"{report.spread(pair)} %",
            ]
        )
    head = ["stencils", "parameters", "seeds", "right under all rotations", "the chiral pair"]
    note = (
        f"(Group I, isotropic stencils, {found[0]['steps']} steps on the eight upright pieces; the "
        f"test has {found[0]['copies']} of each, turned by cubic splines; mean ± deviation over "
        f"the seeds; {'; '.join(dict.fromkeys(map(code, found)))}; `benchmarks/tetris.py`.)"
    )
    return "\n".join([*table(head, cells), "", note])


def tetris_candidates(*found: dict[str, Any]) -> str:
    """What was tried for each size of stencils, and how it did in validation."""
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for row in (row for record in found for row in record["tries"]):
        by_name.setdefault(row["name"], {})[row["size"]] = row
    sizes = [record["runs"][0]["size"] for record in found]
    cells = []
    for name, rows in by_name.items():
        own = [rows.get(size) for size in sizes]
        cells.append(
            [name]
            + [f"{100 * row['accuracy']:.1f} %" if row else "–" for row in own]
            + [f"{100 * statistics.mean(row['each'][:2]):.0f} %" if row else "–" for row in own]
        )
    head = ["network", *(f"{size}³" for size in sizes), *(f"the pair, {size}³" for size in sizes)]
    return "\n".join(table(head, cells))


def volume_records(rows: list[report.Row]) -> str:
    """ModelNet10 in every orientation."""
    cells = []
    for row in rows:
        if row.recipe.table == 5:
            errors = [100 - record.test_error for record in row.records]
            share = f"{report.spread(errors)} %" if errors else "–"
            count = f"{row.records[0].parameters:,}" if errors else "–"
            cells.append(
                [row.recipe.row.replace(", ModelNet10", ""), count, str(len(errors)), share]
            )
    if not cells:
        return ""
    return "\n".join(table(["network", "parameters", "seeds", "right, turned"], cells))


def nodules(found: dict[str, Any] | None) -> str:
    """Areas under the curve, by how many nodules were learned from."""
    if found is None:
        return ""
    counts = sorted({row["count"] for row in found["runs"]})
    cells = []
    for name in dict.fromkeys(row["network"] for row in found["runs"]):
        own = [row for row in found["runs"] if row["network"] == name]
        line = [name, f"{own[0]['parameters']:,}"]
        for count in counts:
            areas = [row["auc"] for row in own if row["count"] == count]
            line.append(f"{statistics.mean(areas):.3f} ± {statistics.stdev(areas):.3f}")
        cells.append(line)
    seeds = len({row["seed"] for row in found["runs"]})
    head = ["network", "parameters", *(f"{count:,} nodules" for count in counts)]
    note = (
        f"(Area under the curve on {found['test']} nodules of other patients, mean ± deviation "
        f"over {seeds} seeds; the size of the nodule alone has {found['by_size']:.3f}; "
        f"{code(found)}; `benchmarks/nodules.py`.)"
    )
    return "\n".join([*table(head, cells), "", note])


# For each file its tables: the name between the markers, the results, and what makes the table.
TABLES: dict[str, dict[str, tuple[str | tuple[str, ...], Callable[..., str]]]] = {
    "README.md": {
        "equivariance in short": (("equivariance.json", RECORDS), equivariance_in_short),
        "accuracy in short": (RECORDS, accuracy_in_short),
        "speed in short": (
            ("engines_cpu.json", "engines_cuda.json", "training_cuda.json"),
            speed_in_short,
        ),
    },
    "docs/results.md": {
        "equivariance": ("equivariance.json", equivariance_table),
        "compatibility": ("compatibility.json", compatibility_summary),
        "conversion": ("convert_and_rotate.json", conversion_table),
        "every angle": ("every_angle.json", every_angle_table),
        "costs": ("build_and_size.json", costs_table),
        "cpu layers": ("engines_cpu.json", cpu_layers),
        "training on a cpu": ("training_cpu.json", training_speed),
        "networks on a cpu": ("networks_cpu.json", networks),
        "gpu layers": ("engines_cuda.json", gpu_layers),
        "training on a gpu": ("training_cuda.json", training_speed),
        "networks on a gpu": ("networks_cuda.json", networks),
        "networks of equal work": ("networks_cuda_flops.json", networks),
        "time of networks": (
            "networks_cuda.json",
            lambda found: time_of_networks(found, read("networks_cuda_before.json")),
        ),
        "gpu kernels": ("engines_cuda.json", gpu_kernels),
        "gpu fused": ("engines_cuda.json", gpu_fused),
        "volumes on a gpu": ("volume_engines_cuda.json", volume_speed_on_a_gpu),
    },
    "docs/compatibility.md": {
        "compatibility": ("compatibility.json", compatibility_details),
        "device tests": ("device_tests.json", device_tests),
    },
    "CONTRIBUTING.md": {"faults": ("mutants.json", faults)},
    "docs/training.md": {
        "learning rates": ("learning_rates.json", learning_rates),
        "lag of norms": ("learning_rates.json", lag_of_norms),
        "heads": ("learning_rates.json", heads),
        "weights": (WEIGHTS, weights),
    },
    "docs/choosing.md": {
        "depth": ("depth.json", depth_by_activation),
        "depth by halving": ("depth.json", depth_by_halving),
    },
    "docs/migrating.md": {"migrating": ("migrating.json", migrating_table)},
    "docs/converting.md": {"pretrained": ("pretrained.json", pretrained_table)},
    "docs/zoo.md": {"zoo": ("zoo.json", zoo), "zoo of volumes": ("zoo_volumes.json", zoo)},
    "docs/volumes.md": {
        "equivariance of volumes": ("volumes.json", volume_errors),
        "speed of volumes": ("volume_engines_cpu.json", volume_speed),
        "tetris": (("tetris_3.json", "tetris_5.json"), tetris),
        "tetris candidates": (("tetris_3.json", "tetris_5.json"), tetris_candidates),
        "modelnet": (RECORDS, volume_records),
        "nodules": ("nodules.json", nodules),
    },
}
# What needs a machine that there may have been none of.
NOT_EVERYWHERE = (
    "nodules.json",
    "device_tests.json",
    "networks_cpu.json",
    "networks_cuda.json",
    "networks_cuda_before.json",
    "networks_cuda_flops.json",
    "volume_engines_cuda.json",
)


def read(results: str) -> Any:
    """What a benchmark found, or nothing where it may be missing and is; rows of the records."""
    if results == RECORDS:
        return report.rows(records.load_all(ROOT / "records"))
    if results == WEIGHTS:
        return [
            Weights.find(path.parent) for path in sorted((ROOT / WEIGHTS).glob("*/config.json"))
        ]
    path = RESULTS / results
    if results in NOT_EVERYWHERE and not path.exists():
        return None
    return json.loads(path.read_text(encoding="utf-8"))


def with_tables(text: str, tables: dict[str, str]) -> str:
    """The text with every table between its markers made anew."""
    for name, content in tables.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(
            pattern,
            lambda m, content=content: f"{m[1]}{content and content + chr(10)}{m[2]}",
            text,
            flags=re.S,
        )
        if count != 1:
            raise SystemExit(f"expected the markers of table {name!r} once; found {count}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    for name, tables in TABLES.items():
        file = ROOT / name
        text = file.read_text(encoding="utf-8")
        made = {
            marker: make(*(read(one) for one in ((of,) if isinstance(of, str) else of)))
            for marker, (of, make) in tables.items()
        }
        wanted = with_tables(text, made)
        if options.check and wanted != text:
            sys.exit(f"{name}: a table differs from benchmarks/results")
        if wanted != text:
            temporary = file.with_suffix(".tmp")
            temporary.write_text(wanted, encoding="utf-8")
            os.replace(temporary, file)


if __name__ == "__main__":
    main()
