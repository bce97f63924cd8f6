"""One frozen recipe per row of the paper's tables, with the paper's number in it.

A recipe is a value: what is trained on what, and how. This module knows nothing of tensors, files
or loops; `train` reads a recipe, `report` puts what came out beside the paper's number.

Recipes named ``…_paper`` are the paper's: its network, initialisation and schedule. Those without
the suffix are ours where they differ; `econv report` has a table of how.
"""

from __future__ import annotations

import ast
import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

__all__ = ["RECIPES", "Recipe", "recipe"]

OPTIMIZERS = ("adam", "adamw", "sgd")
SCHEDULES = ("steps", "cosine", "exponential")

PAPER_NOTE = "the paper's recipe"
CONTROL = "control"
"""The note of rows for comparison, of which one seed is enough."""
_MOST = 1_000_000
"""Of epochs, and whatever else is counted: more is a slip of the hand."""
_LONGEST_NAME = 120  # bytes; file systems allow 255, some tools less
Items = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Recipe:
    """How one row of a table is trained.

    Raises:
        ValueError: for settings out of their range.

    >>> RECIPES["mnist_rot_p8"].with_changes({"epochs": "3"}).epochs
    3
    """

    name: str
    table: int
    """1, 2 or 3 as in the paper; 4 for upright images tested at every angle, 5 for volumes, 0 for
    the rest."""
    row: str
    """How the table names it: by what is trained, which may not be the layer of the paper's row."""
    dataset: str
    model: str
    """A name for :func:`econv.create_model`."""
    model_options: Items = ()
    """Keywords for it, as pairs."""
    paper_error: float | None = None
    """Test error in percent."""
    paper_parameters: str = ""
    epochs: int = 200
    batch_size: int = 128
    """Images in each step, of all processes together."""
    optimizer: str = "adamw"
    """``"adam"`` adds the decay to the gradient, ``"adamw"`` shrinks the weights themselves,
    ``"sgd"`` has a Nesterov momentum of 0.9 without dampening and adds it to the gradient."""
    learning_rate: float = 1e-3
    """The highest of the schedule."""
    schedule: str = "cosine"
    """``"steps"`` divides by 10 at the milestones, ``"cosine"`` falls to the final rate along half
    a wave, ``"exponential"`` by equal factors."""
    milestones: tuple[float, ...] = ()
    """Of ``"steps"``, as fractions of the epochs."""
    final_rate: float = 0.0
    """Of the other schedules."""
    warmup_epochs: float = 0.0
    """How long the rate first rises in a straight line."""
    weight_decay: float = 0.0
    """On the weights of convolutions and the classifier; not on norms and biases."""
    augmentation: Items = ()
    """Keywords of ``econv.data.Augmentation``, as pairs."""
    label_smoothing: float = 0.0
    ema_decay: float = 0.0
    """Of the moving average of the weights that is evaluated; 0 for the weights themselves."""
    evaluate_every: int = 1
    """Epochs from one look at the validation split to the next."""
    retrain_on_all: bool = False
    """After the selection on the validation split, train anew on both and take the last epoch."""
    test_angles: int = 0
    """So many angles, equally spaced from 0, that test images are turned by: the test error then is
    the mean over them. 0 for test images as they are."""
    disc: bool = False
    """Whether images are seen in their inscribed disc only, which turns onto itself."""
    minimum_seeds: int = 3
    note: str = ""

    def __post_init__(self) -> None:
        _expect(self.table in range(6), "table", "from 0 to 5", self.table)
        _expect(self.optimizer in OPTIMIZERS, "optimizer", f"one of {OPTIMIZERS}", self.optimizer)
        _expect(self.schedule in SCHEDULES, "schedule", f"one of {SCHEDULES}", self.schedule)
        for name in ("epochs", "batch_size", "evaluate_every", "minimum_seeds"):
            _expect(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
            _expect(getattr(self, name) <= _MOST, name, f"at most {_MOST:,}", getattr(self, name))
        _expect(0 < self.learning_rate < math.inf, "learning_rate", "above 0", self.learning_rate)
        for name in ("final_rate", "warmup_epochs", "weight_decay"):
            _expect(0 <= getattr(self, name) < math.inf, name, "0 or more", getattr(self, name))
        for name in ("label_smoothing", "ema_decay"):
            _expect(0 <= getattr(self, name) < 1, name, "at least 0, below 1", getattr(self, name))
        if self.schedule == "exponential":
            _expect(self.final_rate > 0, "final_rate", "above 0 to fall to", self.final_rate)
        _expect(0 <= self.test_angles <= 360, "test_angles", "0 to 360", self.test_angles)
        inside = all(0 < milestone < 1 for milestone in self.milestones)
        _expect(inside, "milestones", "fractions between 0 and 1", self.milestones)

    def rate(self, epoch: float) -> float:
        """The learning rate after so many epochs, a fraction for steps within one.

        >>> RECIPES["mnist_rot_p8_paper"].rate(150)
        1e-05
        """
        if epoch < self.warmup_epochs:
            return self.learning_rate * epoch / self.warmup_epochs
        if self.schedule == "steps":
            passed = sum(epoch >= milestone * self.epochs for milestone in self.milestones)
            return self.learning_rate / 10**passed
        rest = self.epochs - self.warmup_epochs
        part = min((epoch - self.warmup_epochs) / rest, 1.0) if rest > 0 else 1.0
        if self.schedule == "exponential":
            return float(self.learning_rate * (self.final_rate / self.learning_rate) ** part)
        height = (1 + math.cos(math.pi * part)) / 2
        return self.final_rate + (self.learning_rate - self.final_rate) * height

    def settings(self) -> dict[str, Any]:
        """What decides the result, ready for JSON: two runs with the same are one row."""
        told = asdict(self)
        for name in ("row", "table", "paper_error", "paper_parameters", "minimum_seeds", "note"):
            del told[name]
        for name in ("test_angles", "disc"):  # records from before there were any say nothing
            if not told[name]:
                del told[name]
        told["model_options"] = _listed(dict(self.model_options))
        told["augmentation"] = _listed(dict(self.augmentation))
        told["milestones"] = list(self.milestones)
        return told

    def with_changes(self, changes: Mapping[str, str]) -> Recipe:
        """A copy with other values, read from text; its name says which.

        ``model_options.dropout=0.1`` and ``augmentation.rotate=true`` set one of the keywords.

        >>> RECIPES["mnist_rot_p8"].with_changes({"learning_rate": "0.01"}).name
        'mnist_rot_p8+learning_rate=0.01'
        """
        kinds = {field.name: str(field.type) for field in fields(self)}
        fixed = ("name", "table", "row", "paper_error", "paper_parameters")
        values: dict[str, Any] = {}
        for key, text in changes.items():
            owner, _, keyword = key.partition(".")
            if keyword and kinds.get(owner) == "Items":
                items = dict(values.get(owner, getattr(self, owner)))
                items[keyword] = _literal(text)
                values[owner] = tuple(items.items())
            elif owner in kinds and owner not in fixed and not keyword and kinds[owner] != "Items":
                values[owner] = _read(key, text, kinds[owner])
            else:
                open_fields = [name for name in kinds if name not in fixed]
                raise ValueError(
                    f"{self.name} has no setting {key!r}: expected one of "
                    f"{', '.join(open_fields)}; keywords as model_options.dropout"
                )
        suffix = "".join(f"+{key}={_plain(text)}" for key, text in sorted(changes.items()))
        return replace(self, name=_short(self.name + suffix), **values)


def recipe(name: str) -> Recipe:
    """The recipe of that name, or an error that lists the names there are.

    Raises:
        ValueError: for an unknown name.

    >>> recipe("mnist_rot_p8").with_changes({"epochs": "3"}).epochs
    3
    """
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}: expected one of {', '.join(RECIPES)}")
    return RECIPES[name]


def _expect(holds: bool, name: str, what: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"expected {name}: {what}; got {value!r}")


def _read(key: str, text: str, kind: str) -> Any:
    try:
        if kind == "int":
            return int(text)
        if kind == "float":
            value = float(text)
            if not math.isfinite(value):
                raise ValueError
            return value
        if kind == "bool":
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[
                text.lower()
            ]
        if kind.startswith("tuple"):
            return tuple(float(part) for part in text.split(",") if part.strip())
    except (ValueError, KeyError):
        words = {"int": "a whole number", "float": "a number", "bool": "true or false"}
        what = words.get(kind, "numbers with commas between them")
        raise ValueError(f"expected {key}: {what}; got {text!r}") from None
    return text


def _literal(text: str) -> Any:
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _plain(text: str) -> str:
    """The text as part of a folder's name."""
    return "".join(c if c.isalnum() or c in ".,-_" else "_" for c in text.replace(" ", ""))


def _short(name: str) -> str:
    """The name, or one as short as folders' names must be, with a hash in place of the rest.

    >>> len(_short("x" * 300)), _short("x" * 120) == "x" * 120
    (120, True)
    """
    content = name.encode()
    if len(content) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(content).hexdigest()[:16]
    return content[: _LONGEST_NAME - 17].decode(errors="ignore") + "+" + digest


def _listed(items: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back: tuples become lists."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in items.items()}


_PAPER_MNIST: dict[str, Any] = {
    "dataset": "mnist_rot",
    "epochs": 200,
    "optimizer": "adam",
    "learning_rate": 1e-3,
    "schedule": "steps",
    "milestones": (0.5, 0.75),
    "weight_decay": 0.01,
}
_OUR_MNIST: dict[str, Any] = {
    "dataset": "mnist_rot",
    "epochs": 150,
    "optimizer": "adamw",
    "learning_rate": 5e-3,
    "schedule": "cosine",
    "warmup_epochs": 5.0,
    "weight_decay": 0.1,
    "label_smoothing": 0.05,
    "ema_decay": 0.999,
    "retrain_on_all": True,
}
_PAPER_CIFAR: dict[str, Any] = {
    "epochs": 300,
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "schedule": "steps",
    "milestones": (0.5, 0.75),
    "weight_decay": 1e-3,
    "augmentation": (("shift", 4), ("flip", True)),
}
_OUR_CIFAR: dict[str, Any] = {
    "epochs": 80,
    "batch_size": 256,
    "optimizer": "sgd",
    "learning_rate": 0.2,
    "schedule": "cosine",
    "warmup_epochs": 3.0,
    "weight_decay": 1e-3,
    "label_smoothing": 0.05,
    "ema_decay": 0.999,
    "augmentation": (("shift", 4), ("flip", True)),
}
# What the paper's text says of every PDO-eConv: central differences, He's scheme of section 4.4.
_PAPER_LAYERS: dict[str, Any] = {"stencils": "central", "init": "paper"}
# Operators of second order on 3×3 pixels have six coefficients, not nine, and cost 9 products, not
# 25: the same parameters pay for wider layers, which learn more in a third of the time.
_SECOND_ORDER = ("options", {"operators": "order<=2", "size": 3})
# Nine central differences are a basis of all filters of 3×3, and quarter turns of them are exact.
_G_CNN = ("options", {"stencils": "central", "size": 3})
# Networks of millions of parameters also learn what should not be learned: a part of each image is
# hidden from them.
_LARGE_CIFAR: dict[str, Any] = {
    "epochs": 50,
    "label_smoothing": 0.1,
    "augmentation": (("shift", 4), ("flip", True), ("padding", "reflect"), ("erase", 12)),
}
_OUR_NETWORKS: dict[str, dict[str, Any]] = {
    "resnet26_p6": {
        "epochs": 100,
        "model_options": (("fields", (8, 15, 32)), _SECOND_ORDER),
    },
    "resnet26_p6m": {"model_options": (("fields", (6, 12, 22)), _SECOND_ORDER)},
    "resnet44_p8": {**_LARGE_CIFAR, "model_options": (("fields", (16, 32, 48)), _SECOND_ORDER)},
    "resnet26_p8": {**_LARGE_CIFAR, "model_options": (_SECOND_ORDER,)},
    "resnet44_p4m": {"model_options": (_G_CNN,)},
}
# A classifier for ten times as many classes takes the place of a field: the table's parameters.
_FIELDS_OF_100 = {"resnet26_p6": (8, 15, 31), "resnet26_p6m": (6, 12, 21)}


def _mnist_rows() -> list[Recipe]:
    # Orientation pooling leaves parameters for wider layers within the paper's 26.8k.
    wider = (("pool", "max"), ("fields", (8, 8, 8, 8, 8, 10)), ("dropout", 0.1))
    rows: list[tuple[str, str, str, Items, float, str]] = [
        ("mnist_rot_cnn", "CNN", "convnet6", (), 5.03, "22k"),
        ("mnist_rot_p4", "PDO-eConv, p4", "convnet6_p4", (), 2.28, "25k"),
        ("mnist_rot_p8", "PDO-eConv, p8", "convnet6_p8", wider, 1.87, "26k"),
    ]
    # Nine central differences are a basis of all filters of 3×3, and quarter turns of them are
    # exact: with them a p4 network is a G-CNN.
    paper_rows = {"mnist_rot_p4": ("G-CNN, p4", {**_PAPER_LAYERS, "size": 3})}
    found = []
    for name, row, model, options, error, parameters in rows:
        common: dict[str, Any] = {
            "table": 1,
            "row": row,
            "model": model,
            "paper_error": error,
            "paper_parameters": parameters,
        }
        note = "isotropic 5×5; the paper's row is a G-CNN" if name in paper_rows else ""
        found.append(Recipe(name, model_options=options, note=note, **common, **_OUR_MNIST))
        paper: dict[str, Any] = {**common, **_PAPER_MNIST, "note": PAPER_NOTE}
        if model != "convnet6":  # an ordinary network has no such layers
            paper["row"], layers = paper_rows.get(name, (row, _PAPER_LAYERS))
            paper["model_options"] = (("options", layers),)
        found.append(Recipe(f"{name}_paper", **paper))
        if name == "mnist_rot_p8":
            code = {**_PAPER_LAYERS, "operators": "paper@22.5"}
            paper["model_options"] = (("options", code),)
            paper["note"] = f"{PAPER_NOTE}, the released code's angles"
            found.append(Recipe(f"{name}_angles_paper", **paper))
    return found


def _large_rows() -> list[Recipe]:
    common: dict[str, Any] = {
        "table": 2,
        "row": "PDO-eConv, p8, 7 layers",
        "model": "convnet7_p8",
        "paper_error": 0.709,
        "paper_parameters": "0.65M",
        "augmentation": (("rotate", True),),
    }
    ours: dict[str, Any] = {
        "epochs": 90,
        "note": "turned, scaled and stretched",
        "learning_rate": 3e-3,
        "weight_decay": 0.3,
        "model_options": (("dropout", 0.1),),
        "augmentation": (("rotate", True), ("scale", 0.15), ("stretch", 0.25)),
    }
    paper: dict[str, Any] = {
        "dataset": "mnist_rot",
        "epochs": 300,
        "optimizer": "sgd",
        "learning_rate": 1e-2,
        "schedule": "exponential",
        "final_rate": 1e-5,
        "model_options": (("options", _PAPER_LAYERS),),
        "note": PAPER_NOTE,
    }
    return [
        Recipe("mnist_rot_p8_large", **{**common, **_OUR_MNIST, **ours}),
        Recipe("mnist_rot_p8_large_paper", **common, **paper),
    ]


def _cifar_rows() -> list[Recipe]:
    rows = [
        ("resnet26", "ResNet-26", 11.5, 31.66, "0.37M"),
        ("resnet26_p6", "PDO-eConv, p6, ResNet-26", 5.65, 27.13, "0.36M"),
        ("resnet26_p6m", "PDO-eConv, p6m, ResNet-26", 5.38, 27.00, "0.37M"),
        ("resnet44_p8", "PDO-eConv, p8, ResNet-44", 3.68, 20.01, "2.62M"),
        ("resnet26_p8", "PDO-eConv, p8, ResNet-26", 3.50, 18.40, "4.6M"),
    ]
    # Others of the paper's table, as large as its last two rows or larger, trained as ours are.
    controls = [
        ("resnet44", "ResNet-44", 5.61, 24.08, "2.64M"),
        ("resnet44_p4m", "G-CNN, p4m, ResNet-44", 4.94, 23.19, "2.62M"),
        ("wide_resnet26", "Wide ResNet-26", 4.00, 19.25, "36.5M"),
    ]
    found = []
    for dataset, classes, column in (("cifar10", 10, 2), ("cifar100", 100, 3)):
        for values in rows + controls[: 3 if classes == 10 else 2]:
            model, row = values[0], values[1]
            common: dict[str, Any] = {
                "table": 3,
                "row": f"{row}, CIFAR-{classes}",
                "dataset": dataset,
                "model": f"paper_{model}",
                "paper_error": values[column],
                "paper_parameters": values[4],
            }
            plain: Items = (("num_classes", classes),)
            changed = _OUR_NETWORKS.get(model, {})
            if values in controls:
                common["minimum_seeds"] = 1
                changed = {**_LARGE_CIFAR, "note": CONTROL, **changed}
            ours: dict[str, Any] = {**_OUR_CIFAR, **changed}
            own: dict[str, Any] = dict(changed.get("model_options", ()))
            if classes == 100 and model in _FIELDS_OF_100:
                own["fields"] = _FIELDS_OF_100[model]
            ours["model_options"] = plain + tuple(own.items())
            found.append(Recipe(f"{dataset}_{model}", **common, **ours))
            paper: dict[str, Any] = dict(plain)
            if "_p" in model:
                paper["options"] = {**_PAPER_LAYERS, **({"size": 3} if "p4m" in model else {})}
            found.append(
                Recipe(
                    f"{dataset}_{model}_paper",
                    model_options=tuple(paper.items()),
                    note=PAPER_NOTE,
                    **common,
                    **_PAPER_CIFAR,
                )
            )
    return found


def _upright_rows() -> list[Recipe]:
    """Trained on upright images alone, tested on images at every angle."""
    mnist: dict[str, Any] = {
        **_OUR_MNIST,
        "table": 4,
        "dataset": "mnist",
        "epochs": 12,
        "warmup_epochs": 0.5,
        "retrain_on_all": False,
        "test_angles": 24,
    }
    # One halving, early: what is left of a digit on coarser grids cannot be turned.
    shared: Items = (("pooled_after", (1,)), ("readout", "mean"), ("margin", 4), ("dropout", 0.1))
    smooth: Items = (*shared, ("activation", "silu"), ("antialias", 0.7), ("pool", "mean+std"))
    digits = [
        ("p8", "PDO-eConv, p8", "convnet6_p8", (16, 16, 24, 24, 24, 32)),
        ("p16", "PDO-eConv, p16", "convnet6_p16", (12, 12, 16, 16, 18, 24)),
        ("p8m", "PDO-eConv, p8m", "convnet6_p8m", (12, 12, 16, 16, 18, 22)),
        ("cnn", "CNN", "convnet6", (48, 48, 68, 68, 68, 92)),
    ]
    found = []
    for name, row, model, widths in digits:
        options: Items = (("fields", widths), *(smooth if name != "cnn" else shared))
        row = f"{row}, MNIST"
        found.append(
            Recipe(f"mnist_upright_{name}", row=row, model=model, model_options=options, **mnist)
        )
    cifar: dict[str, Any] = {
        **_OUR_CIFAR,
        "table": 4,
        "dataset": "cifar10",
        "epochs": 20,
        # Pictures that were resampled, as those that turn are.
        "augmentation": (("shift", 4), ("flip", True), ("scale", 0.1)),
        "test_angles": 24,
        "disc": True,
        "minimum_seeds": 1,
        "note": "in the inscribed disc",
    }
    wider: Items = (("margin", 2),)
    pictures: list[tuple[str, str, str, Items]] = [
        (
            "p8",
            "PDO-eConv, p8, ResNet-20",
            "cifar_resnet20_p8",
            (
                ("fields", (8, 16, 32)),
                ("pool", "mean"),
                ("activation", "silu"),
                ("antialias", 0.7),
                *wider,
            ),
        ),
        ("cnn", "ResNet-20", "cifar_resnet20", (("fields", (23, 46, 92)), *wider)),
    ]
    for name, row, model, options in pictures:
        row = f"{row}, CIFAR-10"
        found.append(
            Recipe(f"cifar10_upright_{name}", row=row, model=model, model_options=options, **cifar)
        )
    return found


def _digit_rows() -> list[Recipe]:
    common: dict[str, Any] = {
        **_OUR_MNIST,
        "table": 0,
        "dataset": "digits",
        "epochs": 12,
        "batch_size": 32,
        "warmup_epochs": 1.0,
        "learning_rate": 2e-2,
        "weight_decay": 0.02,
        "ema_decay": 0.98,
        "retrain_on_all": False,
        "minimum_seeds": 1,
    }
    # The mean over the image keeps the answer where the digit turns; the early pooling, time.
    shared = (("pooled_after", (1,)), ("readout", "mean"), ("dropout", 0.1))
    smooth: Items = (("activation", "silu"), ("antialias", 0.7), ("pool", "mean+std"))
    ours = (*shared, ("fields", (4, 6, 6, 8, 8, 10)), *smooth)
    twin = (*shared, ("fields", (20,) * 6))
    upright = {
        **common,
        "table": 4,
        "dataset": "digits_upright",
        "test_angles": 24,
        "minimum_seeds": 3,
    }
    found = []
    for name, row, model, options in (
        ("p8", "PDO-eConv, p8", "convnet6_p8", ours),
        ("cnn", "CNN", "convnet6", twin),
    ):
        plain = Recipe(f"digits_{name}", row=row, model=model, model_options=options, **common)
        row = f"{row}, embedded digits"
        own: dict[str, Any] = {"row": row, "model": model, "model_options": options}
        found += [plain, Recipe(f"digits_upright_{name}", **own, **upright)]
    return found


def _volume_rows() -> list[Recipe]:
    """ModelNet10, tested in every orientation."""
    common: dict[str, Any] = {
        "table": 5,
        "batch_size": 64,
        "optimizer": "adamw",
        "learning_rate": 3e-3,
        "warmup_epochs": 2.0,
        "weight_decay": 0.05,
        "label_smoothing": 0.1,
        "ema_decay": 0.998,
    }
    smooth: Items = (("activation", "silu"), ("antialias", 0.7), ("pool", "mean"))
    networks: list[tuple[str, str, str, Items, Items]] = [
        ("O", "PDO-eConv, O", "convnet6_3d_O", (("pool", "mean+max"),), smooth),
        ("cnn", "CNN", "convnet6_3d", (), ()),
    ]
    found = []
    for name, row, model, turned, upright in networks:
        dropout: Items = (("dropout", 0.1),)
        for kind, options, augmentation in (
            ("rot", turned, (("rotate", True), ("scale", 0.1))),
            ("upright", upright, (("scale", 0.1), ("shift", 1))),
        ):
            found.append(
                Recipe(
                    f"modelnet10_{kind}_{name}",
                    row=f"{row}, ModelNet10, trained {'turned' if kind == 'rot' else kind}",
                    dataset=f"modelnet10_{kind}",
                    model=model,
                    model_options=dropout + options,
                    augmentation=augmentation,
                    epochs=40 if kind == "rot" else 25,
                    **common,
                )
            )
    return found


RECIPES: dict[str, Recipe] = {
    found.name: found
    for found in [
        *_digit_rows(),
        *_mnist_rows(),
        *_large_rows(),
        *_cifar_rows(),
        *_upright_rows(),
        *_volume_rows(),
    ]
}
"""Every recipe, by name, in the order of the tables."""
