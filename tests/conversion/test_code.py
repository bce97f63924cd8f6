"""Code that people write: positions in a row, attention that pools, einops, bags, sub-pixels."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

from econv import ConversionError, GroupUpsampleConv2d, convert
from econv.lab import calibrate
from econv.testing import equivariance_error

DOUBLE = {"dtype": torch.float64}


def images(size=12, batch=2, channels=3):
    return torch.randn(batch, channels, size, size, **DOUBLE)


class Pooled(nn.Module):
    """A lifting convolution, features without positions by one function, and a classifier."""

    def __init__(self, function, features=8, **modules):
        super().__init__()
        self.lift, self.score = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 1, 1)
        self.norm, self.token = nn.LayerNorm(8), nn.Linear(8, 1)
        self.conv, self.end = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(features, 4)
        self.softmax, self.function = nn.Softmax(-1), function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.end(self.function(self, torch.tanh(self.lift(x))))


def context(self, x):
    """The context of a global context block, on top of the features."""
    b, c, h, w = x.size()
    mask = self.score(x).view(b, 1, h * w).softmax(2).unsqueeze(-1)
    found = torch.matmul(x.view(b, c, h * w).unsqueeze(1), mask).view(b, c, 1, 1)
    return (x + torch.relu(found)).mean((2, 3))


def tokens(self, x):
    y = self.norm(x.flatten(2).transpose(1, 2))
    return (y * self.token(y).softmax(1)).sum(1)


def as_one_row(self, x):
    weights = functional.softmax(self.score(x).view(x.size(0), 1, -1), -1)
    return (x * weights.view(x.size(0), 1, *x.shape[2:])).sum((2, 3))


def shuffled(self, x):
    """Two branches whose channels alternate, and the halves of that."""
    b, c, h, w = x.shape
    y = torch.cat([x[:, :4], self.conv(x)[:, 4:]], 1)
    y = y.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, -1, h, w)
    first, second = y.chunk(2, 1)
    return torch.cat([first, torch.relu(second)], 1).mean((2, 3))


def of_a_class(self, x):
    y = self.conv(x)
    if not isinstance(y, torch.Tensor) or isinstance(y, list | tuple):
        raise TypeError("expected a tensor")
    if torch.jit.isinstance(y, torch.Tensor):
        y = torch.cat([y, x], 1)
    return y.mean((2, 3))


POOLINGS = {
    "view and mean": lambda s, x: x.view(x.shape[0], x.shape[1], -1).mean(-1),
    "flatten and max": lambda s, x: x.flatten(2).max(2)[0],
    "flatten and max, by name": lambda s, x: x.flatten(2).max(dim=-1).values,
    "flatten and min": lambda s, x: torch.min(x.flatten(2), -1).values,
    "logsumexp": lambda s, x: x.flatten(2).logsumexp(-1),
    "deviation": lambda s, x: x.flatten(2).std(-1),
    "a row and back": lambda s, x: torch.relu(x.flatten(2)).view(*x.shape).mean((2, 3)),
    "rows that stay": lambda s, x: (x.flatten(2) / x.flatten(2).sum(2, True).exp()).mean(2),
    "size of a row": lambda s, x: x.flatten(2).sum(-1) / x.flatten(2).size(-1),
    "tokens": lambda s, x: s.norm(x.flatten(2).permute(0, 2, 1)).mean(1),
    "einsum": lambda s, x: torch.einsum("bchw->bc", x),
    "einsum, axes in another order": lambda s, x: torch.einsum("bchw->bhwc", x).mean((1, 2)),
    "einsum with weights": lambda s, x: torch.einsum(
        "bchw,bhw->bc", x, torch.sigmoid(s.score(x)).squeeze(1)
    ),
    "einsum with one head": lambda s, x: torch.einsum(
        "bkhw, bchw -> bc", torch.sigmoid(s.score(x)), x
    ),
    "attention": lambda s, x: (x.flatten(2) * s.score(x).flatten(2).softmax(-1)).sum(-1),
    "attention of maps": as_one_row,
    "attention of a flattened channel": lambda s, x: (
        x.flatten(2) * functional.softmax(s.score(x).flatten(1), 1).unsqueeze(1)
    ).sum(-1),
    "attention, module": lambda s, x: (x.flatten(2) * s.softmax(s.score(x).flatten(2))).sum(-1),
    "attention of every channel": lambda s, x: (x.flatten(2).softmax(-1) * x.flatten(2)).sum(2),
    "attention by bmm": lambda s, x: torch.bmm(
        x.flatten(2), s.score(x).flatten(2).softmax(-1).transpose(1, 2)
    ).squeeze(-1),
    "attention by bmm, tokens": lambda s, x: torch.bmm(
        s.score(x).flatten(2).softmax(-1), x.flatten(2).transpose(1, 2)
    ).squeeze(1),
    "attention by @": lambda s, x: (
        x.flatten(2) @ s.score(x).flatten(2).softmax(-1).transpose(1, 2)
    ).flatten(1),
    "attention of tokens": tokens,
    "global context": context,
    "stacked first": lambda s, x: torch.stack([x, s.conv(x)]).sum(dim=0).mean((2, 3)),
    "stacked vectors": lambda s, x: torch.stack([x.mean((2, 3)), s.conv(x).amax((2, 3))], 2).mean(
        2
    ),
}
WIDE = {
    "classes of Python": of_a_class,
    "repeated channels": lambda s, x: x.repeat(1, 2, 1, 1).mean((2, 3)),
    "two poolings": lambda s, x: torch.cat([x.flatten(2).mean(2), x.flatten(2).amax(2)], 1),
}
POOLINGS["shuffled channels"] = shuffled
CODE = {name: (function, 8) for name, function in POOLINGS.items()}
CODE |= {name: (function, 16) for name, function in WIDE.items()}


def of_a_dtype(self, x):
    return (x if x.dtype in (torch.float32, torch.float64) else x.float()).mean((2, 3))


def test_a_question_about_the_dtype_is_not_noted():
    network = check(Pooled(of_a_dtype))
    assert not [note for note in network.report.notes if "dtype" in note]


def check(source, size=12):
    """Exact, also on other sizes; and with a field for every channel of p1 the source itself."""
    source, x = source.double().eval(), images(size)
    network = convert(source, "p4", "width", example_input=x).eval()
    assert network.report.error <= 1e-12
    for other in (size, size + 1, size + 2):
        y = images(other, batch=3)
        assert network(y).shape == source(y).shape
        calibrate(network, y)
        assert equivariance_error(network, y, 1) <= 1e-12
    options = {"pretrained": True, "pool": "mean", "options": {"stencils": "central"}}
    same = convert(source, "p1", "fields", example_input=x, **options)
    y = images(size + 1, batch=3)
    assert torch.allclose(same(y), source(y), atol=1e-11)
    return network


@pytest.mark.parametrize("name", CODE)
def test_it_converts_is_exact_and_computes_what_the_source_computes(name):
    function, features = CODE[name]
    check(Pooled(function, features))


REFUSED = {
    "attention between positions": (
        lambda s, x: (x.flatten(2).transpose(1, 2) @ x.flatten(2)).mean(1)[:, :8],
        "group features with each other",
    ),
    "attention between channels": (
        lambda s, x: (x.flatten(2) @ x.flatten(2).transpose(1, 2)).mean(2),
        "group features with each other",
    ),
    "rows of positions": (lambda s, x: torch.softmax(x, 2).mean((2, 3)), "rows and columns apart"),
    "sum of columns": (lambda s, x: torch.einsum("bchw->bch", x).mean(2), "over the axes {'W'}"),
    "positions in groups": (
        lambda s, x: x.view(x.shape[0], 8, 4, -1).mean((2, 3)),
        "mixes positions",
    ),
    "filters of the batch": (
        lambda s, x: torch.einsum("bchw,dc->bdhw", x, s.conv.bias.outer(s.conv.bias)).mean((2, 3)),
        "one weight for every position",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_is_not_is_refused(name):
    function, reason = REFUSED[name]
    with pytest.raises(ConversionError, match=reason):
        convert(Pooled(function).double(), "p4", "width", example_input=images())


# einops


def of_einops(name):
    einops = pytest.importorskip("einops")
    layers = pytest.importorskip("einops.layers.torch")
    rearrange, reduce = einops.rearrange, einops.reduce
    to_tokens = functools.partial(rearrange, pattern="b c h w -> b (h w) c")
    return {
        "reduce": lambda: Pooled(lambda s, x: reduce(x, "b c h w -> b c", "mean")),
        "reduce by max": lambda: Pooled(lambda s, x: reduce(x, "b c h w -> b c", "max")),
        "tokens": lambda: Pooled(lambda s, x: s.norm(to_tokens(x)).mean(1)),
        "tokens and back": lambda: Pooled(
            lambda s, x: rearrange(s.norm(to_tokens(x)), "b (h w) c -> b c h w", h=x.shape[2]).mean(
                (2, 3)
            )
        ),
        "channels last": lambda: Pooled(
            lambda s, x: rearrange(
                s.norm(rearrange(x, "b c h w -> b h w c")), "b h w c -> b c h w"
            ).mean((2, 3))
        ),
        "einsum": lambda: Pooled(
            lambda s, x: einops.einsum(x, torch.sigmoid(s.score(x)), "b c h w, b k h w -> b c")
        ),
        "layers": lambda: Pooled(
            lambda s, x: s.reduce(s.norm(s.last(x))),
            last=layers.Rearrange("b c h w -> b h w c"),
            reduce=layers.Reduce("b h w c -> b c", "mean"),
        ),
    }[name]()


@pytest.mark.parametrize(
    "name",
    ["reduce", "reduce by max", "tokens", "tokens and back", "channels last", "einsum", "layers"],
)
def test_einops_is_what_it_does(name):
    check(of_einops(name))


# Convolutions by functions


class Static(nn.Conv2d):
    """A convolution that pads first, by a module of its own, as for images of one size."""

    def __init__(self, *args, size, **options):
        super().__init__(*args, **options)
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        before, after = total // 2, total - total // 2
        self.static_padding = nn.ZeroPad2d((before, after, before, after))

    def forward(self, x):
        x = self.static_padding(x)
        options = self.stride, self.padding, self.dilation, self.groups
        return functional.conv2d(x, self.weight, self.bias, *options)


Conv2dStaticSamePadding = type("Conv2dStaticSamePadding", (Static,), {})


@pytest.mark.parametrize("kind", [Static, Conv2dStaticSamePadding])
@pytest.mark.parametrize("size", [12, 13])
def test_a_convolution_by_a_function_with_padding_of_its_own(kind, size):
    source = nn.Sequential(
        *(kind(3, 8, 3, stride=2, size=size, bias=False), nn.BatchNorm2d(8), nn.Tanh()),
        *(kind(8, 8, 5, size=-(-size // 2), groups=8), kind(8, 4, 1, size=-(-size // 2))),
    ).double()
    x = images(size)
    network = convert(source, "p4", "width", example_input=x).eval()
    assert network.report.error <= 1e-12
    assert network(x).shape == source(x).shape
    assert network.report.source_parameters == sum(p.numel() for p in source.parameters())


def test_filters_that_are_no_parameters_are_refused():
    function = functional.conv2d
    source = Pooled(lambda s, x: function(x, s.conv.weight * 2, None, 1, 1).mean((2, 3)))
    with pytest.raises(ConversionError, match="only filters that are parameters"):
        convert(source.double(), "p4", "width", example_input=images())


def test_a_function_takes_over_its_parameters():
    source = Pooled(
        lambda s, x: functional.conv2d(x, s.conv.weight, s.conv.bias, 1, 1).mean((2, 3))
    )
    check(source)


class FrozenBatchNorm2d(nn.Module):
    """Batch norm whose numbers are buffers."""

    def __init__(self, channels):
        super().__init__()
        self.eps = 1e-5
        for name, number in (("weight", 1), ("bias", 0), ("running_mean", 0), ("running_var", 1)):
            self.register_buffer(name, torch.full((channels,), float(number)))

    def forward(self, x):
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


def test_frozen_batch_norm_keeps_its_numbers_where_weights_are_kept():
    norm = FrozenBatchNorm2d(8)
    for tensor in norm.buffers():
        tensor.uniform_(0.5, 1.5)
    network = check(Pooled(lambda s, x: s.frozen(x).mean((2, 3)), frozen=norm))
    assert any("frozen statistics are learned anew" in note for note in network.report.notes)


# Bags of images


class Bags(nn.Module):
    """Multiple-instance learning: features of every image of a bag, pooled."""

    def __init__(self, how):
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        )
        self.embed, self.weigh, self.end = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 2)
        self.how = how

    def forward(self, x):
        b, i, c, h, w = x.shape
        y = self.features(x.flatten(0, 1) if self.how == "flatten" else x.view(b * i, c, h, w))
        if self.how == "embed":
            return self.end(self.embed(y.flatten(1)).view(b, i, -1).mean(1))
        y = y.unflatten(0, (b, i)).flatten(2) if self.how == "flatten" else y.view(b, i, -1)
        if self.how == "attention":
            return self.end((torch.softmax(self.weigh(y), 1) * y).sum(1))
        return self.end(y.max(1)[0])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("how", ["max", "attention", "flatten", "embed"])
def test_bags_of_images_are_scored_whatever_way_their_images_lie(how, batch):
    source, x = Bags(how).double().eval(), torch.randn(batch, 4, 3, 12, 12, **DOUBLE)
    network = convert(source, "p4", "width", example_input=x).eval()
    assert network.report.error <= 1e-12 < 1e-4 < network.report.source_error
    other = torch.randn(3, 5, 3, 13, 13, **DOUBLE)
    assert network(other).shape == (3, 2)
    assert torch.allclose(network(other), network(torch.rot90(other, 1, (3, 4))), atol=1e-12)
    options = {"pretrained": True, "pool": "mean", "options": {"stencils": "central"}}
    same = convert(source, "p1", "fields", example_input=x, **options)
    assert torch.allclose(same(other), source(other), atol=1e-12)


# Sub-pixels


@pytest.mark.parametrize("match", ["width", "fields"])
@pytest.mark.parametrize("size", [12, 13])
@pytest.mark.parametrize(("kernel", "factor", "last"), [(3, 2, True), (1, 3, False), (5, 2, False)])
def test_pixels_that_a_convolution_gives_as_channels(kernel, factor, last, size, match):
    source = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(8, 8 * factor**2, kernel, padding=kernel // 2), nn.PixelShuffle(factor)),
        *([nn.Sigmoid()] if last else [nn.PReLU(8), nn.Conv2d(8, 3, 3, padding=1)]),
    ).double()
    network = convert(source, "p4", match, example_input=images(size)).eval()
    assert isinstance(network.get_submodule("2"), GroupUpsampleConv2d)
    assert network.report.error <= 1e-12
    assert network(images(11)).shape == source(images(11)).shape


@pytest.mark.parametrize("between", [[nn.ReLU()], [nn.Conv2d(8, 8, 3, 2, 1)]])
def test_pixels_of_other_channels_are_refused_with_a_remedy(between):
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), *between]
    source = nn.Sequential(*layers, nn.PixelShuffle(2), nn.Conv2d(2, 3, 1)).double()
    with pytest.raises(ConversionError, match=r"laid out as pixels|right after a convolution"):
        convert(source, "p4", "width", example_input=images())
