"""Hypotheses beyond the paper, written before the experiments unless they say otherwise, with their tests."""

from __future__ import annotations

from papers.ledger import Claim, across, at_most, changes, grows, lower, near, ordered, pairs, some_lower

V2, DAPE, PLAIN = "dape1x3-kerple", "dape-kerple", "kerple"
SCALINGS = ("linear", "ntk", "yarn")
LINEAR = f"{V2}[bias_channels=false,negative_slope=1.0]"
ALONE = f"{V2}[bias_channels=false]"
KEYS = "keyconv1x3-kerple"
DEEP = [V2, f"{V2}[depth=3]", f"{V2}[depth=4]"]
ROTATED = ["rope", "dape1x3-rope"]
LEAKS = [f"dape1x3-{bias}[leak_future=true]" for bias in ("kerple", "alibi", "fire")]


def read_as(*scalings: str) -> list[tuple[str, str]]:
    return [(f"dape1x3-rope read as {s}", f"rope read as {s}") for s in scalings]


CLAIMS = [
    Claim("square-better", "", "A 3x3 kernel, which also reads the two queries before, is better than 1x3.",
          "square_kernels", lower("dape3x3-kerple", V2)),
    Claim("square-shape", "", "It is the shape and not the number of weights: 3x3 is better than 1x9.",
          "square_kernels", lower("dape3x3-kerple", "dape1x9-kerple")),
    Claim("keys-over-queries", "", "Neighbouring keys tell more than earlier queries: 1x3 is better than 3x1.",
          "square_kernels", lower(V2, "dape3x1-kerple", train="longest")),
    Claim("queries-help", "", "A kernel over queries alone, 3x1, already improves Kerple.",
          "square_kernels", lower("dape3x1-kerple", PLAIN, train="longest")),
    Claim("square-falls", "", "With a 3x3 kernel, too, perplexity falls from the training length to the longest.",
          "square_kernels", changes("dape3x3-kerple", -1)),
    Claim("beyond-seven", "", "Kernels beyond the paper's largest go on improving: 1x11 and 1x15 are better than 1x7.",
          "large_kernels", pairs(("dape1x11-kerple", "dape1x7-kerple"), ("dape1x15-kerple", "dape1x7-kerple"))),
    Claim("beyond-seven-little", "", "Whichever is better, 1x15 and 1x7 differ by less than 3 % of perplexity.",
          "large_kernels", near("dape1x15-kerple", "dape1x7-kerple", 1.03)),
    Claim("largest-not-best", "", "At the longest input the largest kernel, 1x15, is not the best.", "large_kernels",
          some_lower([V2, "dape1x7-kerple", "dape1x11-kerple"], "dape1x15-kerple")),
    Claim("three-convolutions", "", "Three convolutions are better than the paper's two.", "depth", ordered(DEEP[:2])),
    Claim("four-convolutions", "", "Four convolutions are better than three.", "depth", ordered(DEEP[1:])),
    Claim("deep-over-wide", "", "Of stacks that reach equally far, the deeper is better: four of 1x3 against two of 1x5.",
          "depth", lower(DEEP[2], "dape1x5-kerple")),
    Claim("randomized-costs", "", "Randomized positions cost something at the training length, for every method.", "randomized_positions",
          pairs(*((m, f"{m}, randomized") for m in (*ROTATED, PLAIN, V2)), at=["train"])),
    Claim("randomized-helps-rope", "", "At the longest input randomized positions improve RoPE, with and without the convolution.",
          "randomized_positions", pairs(*((f"{m}, randomized", m) for m in ROTATED), at=["longest"]), longer="longer_training"),
    Claim("kerple-needs-none", "", "Kerple with the convolution has no need of them: trained in order it is better.",
          "randomized_positions", lower(V2, f"{V2}, randomized")),
    Claim("convolution-helps-randomized", "", "The convolution helps models with randomized positions as well.", "randomized_positions",
          pairs(*((f"dape1x3-{m}, randomized", f"{m}, randomized") for m in ("rope", PLAIN)))),
    Claim("scaling-helps-rope", "", "Beyond the training length the best scaling improves RoPE, without further training.",
          "rope_scaling", some_lower([f"rope read as {s}" for s in SCALINGS], "rope")),
    Claim("scaling-helps-convolution", "", "It improves RoPE with the convolution as well.",
          "rope_scaling", some_lower([f"dape1x3-rope read as {s}" for s in SCALINGS], "dape1x3-rope")),
    Claim("convolution-helps-scaled", "", "Under every scaling the convolution improves RoPE beyond the training length.",
          "rope_scaling", pairs(*read_as(*SCALINGS), at=[2, "longest"])),
    Claim("ntk-over-linear", "", "NTK-aware scaling is better than linear interpolation, with and without the convolution.",
          "rope_scaling", pairs(*((f"{m} read as ntk", f"{m} read as linear") for m in ROTATED), at=[2, "longest"])),
    Claim("kerple-over-scaled", "", "At the longest input no scaling brings RoPE with the convolution to Kerple with it.",
          "rope_scaling", lower(V2, ["dape1x3-rope", *(a for a, _ in read_as(*SCALINGS))], at=["longest"])),
    Claim("longer-kerple-degrades", "", "After 1,500 steps ALiBi and Kerple are worse at the longest input than at the training length.",
          "longer_training", changes(["alibi", PLAIN], 1)),
    Claim("longer-rope-fails", "", "After 1,500 steps RoPE has at least twice the perplexity at 16 times the training length.",
          "longer_training", changes("rope", 1, factor=2.0), ("LaTeX", "books")),
    Claim("longer-cope", "", "After 1,500 steps CoPE has at the longest input at least twice the perplexity of Kerple with kernel 3.",
          "longer_training", lower(V2, "cope", at=["longest"], factor=2.0), ("LaTeX", "books")),
    Claim("longer-adaptive", "", "After 1,500 steps Transformer-XL's encoding and CoPE rise with the length.",
          "longer_training", changes(["transformer-xl", "cope"], 1), ("books",)),
    Claim("longer-kernel-1-rope", "", "After 1,500 steps kernel 1 (DAPE) makes RoPE worse.", "longer_training", lower("rope", "dape-rope")),
    Claim("longer-blow-up", "", "After 1,500 steps NoPE, RoPE, T5 and FIRE have ten times the perplexity at 16 times the length.",
          "longer_training", changes(["nope", "rope", "t5", "fire"], 1, factor=10.0)),
    Claim("longer-best", "", "After 1,500 steps Kerple with kernel 3 is better than kernel 1 and every plain encoding.", "longer_training",
          lower(V2, [DAPE, "dape-rope", "nope", "rope", "t5", "alibi", PLAIN, "fire", "cope"])),
    Claim("longer-randomized", "", "After 1,500 steps randomized positions improve RoPE at the longest input.",
          "longer_training", lower("rope, randomized", "rope", at=["longest"])),
    Claim("longer-leak", "", "After 1,500 steps the leaks of Kerple, ALiBi and FIRE are at perplexity 1.1 up to twice the length.",
          "longer_training", at_most(LEAKS, 1.1, ["train", 2])),
    Claim("longer-leak-far", "", "And that of Kerple up to 16 times the training length.",
          "longer_training", at_most(LEAKS[:1], 1.1, ["longest"])),
    Claim("longer-overfits", "", "After 1,500 steps each length is read best by the model trained at just that length.", "longer_windows",
          lambda data: [one for n in (64, 256, 1024) for m in (64, 256, 1024) if m != n for one in across((V2, n), (V2, m), (n,))(data)]),
    Claim("longer-falls", "", "Trained on windows of 256 tokens, Kerple with kernel 3 goes on falling to the longest input.",
          "longer_windows", changes(V2, -1, train=256)),
    Claim("longer-short-windows", "", "After 1,500 steps it is, trained at 64, as good (5 %) as RoPE trained at 1024, at short and long inputs.",
          "longer_windows", across((V2, 64), ("rope", 1024), (64, 1024), factor=0.95)),
    Claim("keys-help", "", "Convolving the keys, a linear convolution of each head's scores, already improves Kerple.",
          "ingredients", lower(KEYS, PLAIN)),
    Claim("heads-help", "", "A linear convolution across heads is better than one within each head.", "ingredients", lower(LINEAR, KEYS)),
    Claim("nonlinearity-helps", "", "With the activation in between, the convolution is better than the linear one.",
          "ingredients", lower(ALONE, LINEAR)),
    Claim("bias-channels-help", "", "The bias as further channels improves the convolution of the scores alone.",
          "ingredients", lower(V2, ALONE)),
    Claim("over-linear-relatives", "", "DAPE 1x3 is better than talking heads and multi-token attention on the same encoding.",
          "ingredients", lower(V2, ["talking-kerple", "mta-kerple"])),
    Claim("helps-fox", "", "The convolution also improves the forgetting transformer, whose bias comes from the data.",
          "ingredients", lower("dape1x3-fox", "fox")),
    Claim("lead-grows", "", "The lead over processors that do not read the bias grows with the length. (Suggested by seed 0: tested on later seeds.)",
          "ingredients", lambda data: grows(V2, [KEYS, LINEAR, "mta-kerple"])(data.since(1))),
    Claim("bias-gain-grows", "", "The gain by the bias as further channels grows with the length. (Suggested by seeds 0 and 1: tested on later seeds.)",
          "ingredients", lambda data: grows(V2, ALONE)(data.since(2))),
]  # fmt: skip
