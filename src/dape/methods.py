"""Parsing of method names as in the paper: a score processor and a position encoding.

kerple                          plain scores
dape-kerple                     score convolution with kernel 1 (DAPE)
dape1x3-kerple                  score convolution with kernel 3 (DAPE V2); any kernel size
dape3x3-kerple                  the same over 3 queries × 3 keys, a query's own row and those before it
talking-alibi, mta-rope         any other processor, by its name in SCORES
rope[scaling=linear,factor=8]   options, of the encoding or the processor, whichever has them
kerple[normaliser=ssmax]        a normaliser other than the softmax, with any processor
kerple[canon=ac]                Canon layers before the attention (a), before the MLP (c), or both
rope[window=512]                a causal query sees its own key and those right before it, 512 in all
rope/rope/rope/nope             one method per layer, cycled over the layers
stickbreaking, swan[window=64]  names for longer ones, see PRESETS; an option changes the layers that have it
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dape.positions import POSITIONS, PositionEncoding, build_position
from dape.rebuildable import constructor_parameters as _parameters
from dape.scores import SCORES, Normalised, ScoreProcessor
from dape.scores.normaliser import REFERENCES

# Constructor arguments of a processor that the method decides.
OWN = ("num_heads", "kernel_size", "query_kernel_size", "layer")
# Options of every method, beside those of its encoding and processor.
EVERY = ("normaliser", "window", "canon")
CANON = ("a", "c", "ac")
# Separates the methods of different layers in one name.
LAYERS = "/"
# Methods, and methods of layers, known by a name of their own.
PRESETS: dict[str, str] = {
    "stickbreaking": "nope[normaliser=stickbreaking]",
    # Puvvada et al. 2025, arXiv 2504.08719, table 6: a layer without positions, then three with windows.
    "swan": LAYERS.join(["nope[length=512,normaliser=logn]", *["rope[base=1000000.0,window=512]"] * 3]),
    # Yang et al. 2025, arXiv 2501.18795: three layers with windows, then one without positions.
    "rnope-swa": LAYERS.join([*["rope[window=4096]"] * 3, "nope"]),
}


@dataclass(frozen=True)
class Method:
    """A pair of a position encoding and a score processor, by their names.

    kernel:  (queries, keys) of the processor, None for one that has no kernel.
    options: (name, value) of either constructor, and those in EVERY.
    """

    position: str
    processor: str = "plain"
    kernel: tuple[int, int] | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return self.short_name + _written(self.options)

    @property
    def short_name(self) -> str:
        """The name without options."""
        if self.processor == "plain":
            return self.position
        bare = self.kernel in (None, SCORES[self.processor].bare_kernel)
        kernel = "" if bare else "{}x{}".format(*(self.kernel or ()))
        return f"{self.processor}{kernel}-{self.position}"

    @property
    def is_plain(self) -> bool:
        """Whether scores are not processed."""
        return self.processor == "plain"

    @property
    def direction(self) -> str:
        """ "both", or "causal" for a method that has no meaning when the future is visible."""
        causal = (
            self.window is not None or self.canon or dict(self.options).get("normaliser") == "stickbreaking"
        )
        return "causal" if causal else POSITIONS[self.position].direction

    @property
    def canon(self) -> str:
        """Where Canon layers are in a decoder's layer: "a" before the attention, "c" before the MLP."""
        return dict(self.options).get("canon", "")

    @property
    def window(self) -> int | None:
        """Number of keys that a query sees, its own included; None for all."""
        return dict(self.options).get("window")

    @property
    def reference(self) -> str:
        """The paper of what is special about it: its processor, its normaliser, else its encoding."""
        of_normaliser = REFERENCES.get(dict(self.options).get("normaliser", ""), "")
        return SCORES[self.processor].reference or of_normaliser or POSITIONS[self.position].reference

    @property
    def summary(self) -> str:
        """One-line description."""
        said = POSITIONS[self.position].summary
        if not self.is_plain:
            kernel = "" if self.kernel is None else "{}×{}: ".format(*self.kernel)
            said = f"{kernel}{SCORES[self.processor].summary}; {said}"
        options = _written(self.options).strip("[]").replace(",", ", ")
        return f"{said}; {options}" if options else said

    def build_position(
        self, *, num_heads: int, head_dim: int, hidden_size: int, **options: Any
    ) -> PositionEncoding:
        """Build the position encoding; `options` are in addition to those in the name."""
        own = {name: value for name, value in self.options if self._is_position_option(name)}
        return build_position(
            self.position, num_heads=num_heads, head_dim=head_dim, hidden_size=hidden_size, **(own | options)
        )

    def build_scores(
        self, num_heads: int, *, width: int | None = None, layer: int = 0, **options: Any
    ) -> ScoreProcessor:
        """Build the score processor; `options` are in addition to those in the name.

        width: default number of hidden channels, for processors that have them.
        layer: its index in the model.
        """
        options = {
            name: value
            for name, value in self.options
            if name not in ("window", "canon") and not self._is_position_option(name)
        } | options
        normaliser = options.pop("normaliser", "softmax")
        timed = "length" in options and normaliser in ("ssmax", "logn")
        own = {"length": options.pop("length")} if timed else {}
        cls = SCORES[self.processor]
        asked = _parameters(cls)
        if normaliser != "softmax" and "zero_init" in options:
            own["zero_init"] = options["zero_init"] if "zero_init" in asked else options.pop("zero_init")
        valid = [name for name in asked if name not in OWN]
        if unknown := [name for name in options if name not in valid]:
            raise ValueError(
                f'"{self.short_name}" has no option {", ".join(unknown)}; its score processor has '
                f"{', '.join([*valid, 'normaliser'])}"
            )
        additive = POSITIONS[self.position].additive
        if options.get("bias_channels") and not additive:
            raise ValueError(f'"{self.position}" adds no bias that bias_channels=True could read')
        queries, keys = self.kernel or (None, None)
        given = {
            "num_heads": num_heads,
            "kernel_size": keys,
            "query_kernel_size": queries,
            "bias_channels": additive,
            "width": width,
            "layer": layer,
        }
        arguments = {name: value for name, value in given.items() if name in asked and value is not None}
        processor = cls(**(arguments | options))
        if normaliser == "softmax":
            return processor
        return Normalised(processor, num_heads, normaliser, **own)

    def _is_position_option(self, name: str) -> bool:
        return name in _parameters(POSITIONS[self.position]) and name not in ("num_heads", "width")


def parse_method(name: str) -> Method:
    """Parse a method name; an unknown one raises with the nearest names."""
    pair, options = parse_brackets(name)
    if pair in PRESETS or len(split_outside_brackets(name, LAYERS)) > 1:
        if len(methods := parse_layers(name)) > 1:
            raise ValueError(f'"{name}" names the methods of {len(methods)} layers, where one is expected')
        return methods[0]
    method = _parse_pair(pair)
    if method is None:
        known = [method.name for method in all_methods()]
        near = difflib.get_close_matches(name.lower(), [*known, *PRESETS], n=3, cutoff=0.5) or list(POSITIONS)
        raise ValueError(
            f'unknown method "{name}"; did you mean {", ".join(near)}? `dape methods` lists them all'
        )
    if not options:
        return method
    encoding, processor = _parameters(POSITIONS[method.position]), _parameters(SCORES[method.processor])
    valid = [n for n in (*encoding, *processor) if n not in (*OWN, "head_dim", "hidden_size")]
    for option in options:
        if option not in (*valid, *EVERY, *(("length", "zero_init") if "normaliser" in options else ())):
            raise ValueError(
                f'"{method.name}" has no option {option}; it has {", ".join(dict.fromkeys([*valid, *EVERY]))}'
            )
    window = options.get("window")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window={window}: a query sees at least its own key")
    if options.get("canon", "a") not in CANON:
        raise ValueError(f"canon={options['canon']}: Canon layers are at one of {', '.join(CANON)}")
    return Method(method.position, method.processor, method.kernel, tuple(sorted(options.items())))


def parse_layers(method: str | Sequence[str]) -> tuple[Method, ...]:
    """Parse the methods of a model's layers, cycled over them: a name, a list, or names separated by "/"."""
    names = split_outside_brackets(method, LAYERS) if isinstance(method, str) else list(method)
    if not names:
        raise ValueError("an empty list of methods: give at least one")
    layers: list[Method] = []
    for name in names:
        pair, options = parse_brackets(name)
        layers += _preset(pair, options) if pair in PRESETS else (parse_method(name),)
    return tuple(layers)


def layer_methods(method: str | Sequence[str], num_layers: int) -> tuple[Method, ...]:
    """The method of every layer of a model."""
    methods = parse_layers(method)
    return tuple(methods[layer % len(methods)] for layer in range(num_layers))


def encoding_index(methods: Sequence[Method]) -> list[int]:
    """Index of each layer's encoding in a model: one per layer, or one for all layers that share a method."""
    index: list[int] = []
    shared: dict[Method, int] = {}
    for method in methods:
        new = max(index, default=-1) + 1
        index.append(shared.setdefault(method, new) if POSITIONS[method.position].shared else new)
    return index


def check_embeddings(methods: Sequence[Method]) -> None:
    """Raise if only some layers have an encoding that is added to the embeddings, before all layers."""
    for method in methods:
        embeds = POSITIONS[method.position].embed is not PositionEncoding.embed
        if embeds and any(other.position != method.position for other in methods):
            raise ValueError(
                f'"{method.position}" is added to the embeddings, before all layers: it cannot be the encoding of some'
            )


def canonical(method: str | Sequence[str]) -> str:
    """Canonical name of a method, or of a list of methods for layers."""
    return LAYERS.join(parsed.name for parsed in parse_layers(method))


def parse_brackets(text: str) -> tuple[str, dict[str, Any]]:
    """A name and the options after it in brackets: slurm[partition=gpu,gpus_per_node=8]. No brackets: no options."""
    match = re.fullmatch(r"(?P<name>[^\[\]]+)(?:\[(?P<options>[^\[\]]*)\])?", text)
    if match is None or not match["options"]:
        return match["name"] if match else text, {}
    return match["name"], dict(parse_option(part, text) for part in match["options"].split(","))


def split_outside_brackets(text: str, separator: str) -> list[str]:
    """Split a text at separators outside brackets."""
    return re.findall(rf"(?:\[[^\]]*\]|[^\[{re.escape(separator)}])+", text)


def all_methods() -> list[Method]:
    """Every encoding with every processor, in the listed kernel sizes."""
    methods = []
    for processor, cls in SCORES.items():
        kernels: tuple = cls.listed or (None,)
        methods += [Method(position, processor, kernel) for kernel in kernels for position in POSITIONS]
    return methods


def register_scores(name: str, processor: type[ScoreProcessor]) -> None:
    """Register a score processor of your own for all methods: "NAME-kerple", "NAME-rope" …"""
    if not re.fullmatch(r"[a-z][a-z_]*", name):
        raise ValueError(f'a processor\'s name is written in the letters a to z and "_", got "{name}"')
    _register(SCORES, name, processor, ScoreProcessor)


def register_position(name: str, encoding: type[PositionEncoding]) -> None:
    """Register a position encoding of your own for all methods: "NAME", "dape1x3-NAME" …"""
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
        raise ValueError(f'an encoding\'s name is written in a to z, 0 to 9, "_" and "-", got "{name}"')
    _register(POSITIONS, name, encoding, PositionEncoding)


def _register(registry: dict[str, Any], name: str, cls: type, base: type) -> None:
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise TypeError(f"{cls!r} is not a subclass of {base.__name__}")
    if registry.get(name, cls) is not cls:
        raise ValueError(f'there is already a "{name}": {registry[name].__name__}; choose another name')
    registry[name] = cls


def _preset(preset: str, options: dict[str, Any]) -> tuple[Method, ...]:
    """The methods of a preset; an option that some of them have changes those alone."""
    layers = [parse_method(name) for name in split_outside_brackets(PRESETS[preset], LAYERS)]
    changed = []
    for layer in layers:
        own = dict(layer.options)
        given = {
            name: value
            for name, value in options.items()
            if name in own or not any(name in dict(other.options) for other in layers)
        }
        changed.append(parse_method(replace(layer, options=tuple(sorted((own | given).items()))).name))
    return tuple(changed)


def _parse_pair(pair: str) -> Method | None:
    if pair in POSITIONS:
        return Method(pair)
    written, _, position = pair.partition("-")
    match = re.fullmatch(r"(?P<name>[a-z_]+)(?:(?P<queries>[1-9]\d*)x(?P<keys>[1-9]\d*))?", written)
    if match is None or position not in POSITIONS or match["name"] not in SCORES or match["name"] == "plain":
        return None
    cls = SCORES[match["name"]]
    if "kernel_size" not in _parameters(cls):
        return None if match["keys"] else Method(position, match["name"])
    kernel = (int(match["queries"]), int(match["keys"])) if match["keys"] else cls.bare_kernel
    if kernel[0] > 1 and "query_kernel_size" not in _parameters(cls):
        return None
    return Method(position, match["name"], kernel)


def parse_option(text: str, whole: str = "") -> tuple[str, Any]:
    """Parse name=value; the value is a number, true, false, none, or else a word. whole: the text that has the option."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not name or not equals or not value:
        where = f' in "{whole}"' if whole else ""
        raise ValueError(f'"{text}"{where} is not an option: write name=value')
    known = {"true": True, "false": False, "none": None}
    if value.lower() in known:
        return name, known[value.lower()]
    for number in (int, float):
        try:
            return name, number(value)
        except ValueError:
            continue
    return name, value


def _written(options: tuple[tuple[str, Any], ...]) -> str:
    def text(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) or value is None else f"{value}"

    return "[" + ",".join(f"{name}={text(value)}" for name, value in options) + "]" if options else ""
