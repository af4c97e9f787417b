"""Claims of DAPE V2, each once: section, statement, the experiments that decide it, and the test."""

from __future__ import annotations

from functools import partial

import torch

from papers.ledger import (
    Claim,
    accurate,
    across,
    at_most,
    changes,
    exact,
    grows,
    lower,
    more_accurate,
    more_on_hits,
    on_hits,
    ordered,
    overhead_falls,
    pairs,
    recalls_more,
    sink,
    slower,
    slower_when_longer,
    some_lower,
)

V2, DAPE, PLAIN = "dape1x3-kerple", "dape-kerple", "kerple"
BOTH = ("LaTeX", "books")
MAIN = ("headline", "code")
KERNELS = ["dape-kerple", "dape1x3-kerple", "dape1x5-kerple", "dape1x7-kerple"]
BIASES = ("alibi", "kerple", "fire")
LEAKS = [f"dape1x3-{bias}[leak_future=true]" for bias in BIASES]
ORDER = [
    "even_pairs",
    "modular_arithmetic",
    "stack_manipulation",
    "reverse_string",
    "modular_arithmetic_brackets",
    "solve_equation",
    "duplicate_string",
    "missing_duplicate_string",
    "odds_first",
    "binary_addition",
    "compute_sqrt",
]
NARROW, MIDDLE, WIDE = "dape1x3-kerple[width=10]", "dape1x3-kerple[width=21]", "dape-kerple[width=64]"


def linear_convolution(_: object) -> float:
    """Largest difference between scores convolved along the keys and scores with convolved keys, in float64."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(2, 16, 3, 8, dtype=torch.float64, generator=generator)
    kernel = torch.randn(3, 1, 3, dtype=torch.float64, generator=generator)
    convolve = partial(torch.nn.functional.conv1d, weight=kernel, padding=1, groups=3)
    of_scores = convolve(torch.einsum("ihd,jhd->ihj", queries, keys))
    of_keys = torch.einsum("ihd,dhj->ihj", queries, convolve(keys.permute(2, 1, 0)))
    return float((of_scores - of_keys).abs().max())


def cost_ratio(_: object) -> float:
    """|cost(B, T) / cost(BK, T/K) − K| of the paper's formula B(hdT² + hDT²), for K = 16."""

    def cost(batch: int, length: int, heads: int = 12, width: int = 64, hidden: int = 32) -> int:
        return batch * (heads * width * length**2 + heads * hidden * length**2)

    return abs(cost(2, 2048) / cost(32, 128) - 16)


CLAIMS = [
    Claim("best", "4.1", "Of the paper's methods DAPE 1x3-Kerple is the best within and beyond the training length, on both corpora.",
          MAIN, lower(V2, ["rope", "alibi", PLAIN, "fire", DAPE]), BOTH),
    Claim("beats-dape-far", "4.1", "At the longest input DAPE 1x3-Kerple is better than DAPE-Kerple, on both corpora.",
          MAIN, lower(V2, DAPE, at=["longest"], train="shortest"), BOTH),
    Claim("gain-grows", "4.1", "Its lead over Kerple is larger at the longest input than at the training length.",
          MAIN, grows(V2, PLAIN, train="shortest"), BOTH),
    Claim("kernel-1", "4.1", "DAPE-Kerple (kernel 1) is better than plain Kerple at every length. (Figure 2)",
          MAIN, lower(DAPE, PLAIN), BOTH),
    Claim("improves-with-length", "4.1", "The perplexity of DAPE 1x3-Kerple falls beyond the training length. (Figure 2)",
          MAIN, changes(V2, -1, train="shortest"), BOTH),
    Claim("adaptive-improves", "H", "So does that of DAPE-Kerple (kernel 1). (Table 8)",
          MAIN, changes(DAPE, -1, train="shortest"), ("books", "LaTeX")),
    Claim("rope-fails", "1", "RoPE degrades notably, failing entirely, when the input is twice the training length.",
          MAIN, changes("rope", 1, at=[2], train="shortest"), BOTH, paper="Appendix A: 4.07 → 86.20"),
    Claim("kerple-degrades", "1", "ALiBi and Kerple degrade, too, beyond the training length.",
          MAIN, changes([PLAIN, "alibi"], 1), BOTH),
    Claim("gain-is-recall", "3.3", "Perplexity is mostly recall: most of the gain over Kerple is on tokens that the input has shown.",
          MAIN, on_hits(V2, PLAIN), BOTH, paper="cited"),
    Claim("recall-gains-more", "3.3", "Per token, the gain over Kerple is larger where the input has shown the trigram.",
          MAIN, more_on_hits(V2, PLAIN), BOTH, ours=True),
    Claim("new-hits", "3.3", "On tokens that only inputs beyond the training length can copy, its loss falls more than Kerple's.",
          MAIN, recalls_more(V2, PLAIN), BOTH, ours=True),
    Claim("equal-time", "4.9", "Trained for the same time, not steps, it is better than Kerple.",
          "headline", lower(f"{V2}, equal time", PLAIN), ours=True),
    Claim("equal-time-short", "4.9", "So it is after short trainings (500 steps of Kerple).",
          "effect", lower(f"{V2}, equal time", PLAIN, train="shortest"), ours=True),
    Claim("nope-mlp", "3.2", "Without positions, kernel 1 (DAPE) improves NoPE.",
          "nope_rope", lower("dape-nope", "nope"), paper="Figure 1"),
    Claim("nope-conv", "4.4", "Without positions, kernel 3 improves NoPE within and beyond the training length.",
          ("nope_rope", "code"), lower("dape1x3-nope", "nope"), paper="Figure 1"),
    Claim("nope-600-to-100", "1", "Trained at 128, at 8192 tokens perplexity falls from over 600 to just above 100: six-fold. (NoPE, as we read it)",
          ("code", "nope_rope"), lower("dape1x3-nope", "nope", at=["longest"], factor=6.0), paper="> 600 → > 100"),
    Claim("rope-mlp-hurts", "4.4", "Kernel 1 (DAPE) makes RoPE worse.",
          "nope_rope", lower("rope", "dape-rope"), paper="Figure 1", longer="beyond/longer_training"),
    Claim("rope-conv", "4.4", "Kernel 3 improves RoPE within and beyond the training length.",
          "nope_rope", lower("dape1x3-rope", "rope"), paper="Figure 1"),
    Claim("rope-gain-grows", "3.2", "The gain of kernel 3 over RoPE is largest at long inputs.",
          "nope_rope", grows("dape1x3-rope", "rope"), paper="Figure 1"),
    Claim("rope-kernel-3", "3", "For RoPE, kernel 3 is better than kernel 1.",
          "nope_rope", lower("dape1x3-rope", "dape-rope"), paper="Figure 1"),
    Claim("best-of-nine", "4.1", "Of nine methods, NoPE, T5 and CoPE included, DAPE 1x3-Kerple is the best (short trainings).",
          "baselines", lower(V2, ["nope", "rope", "t5", "alibi", PLAIN, "fire", "cope", DAPE]), BOTH),
    Claim("cope-poor", "4.1", "CoPE does poorly at the longest input: several times the perplexity of DAPE 1x3-Kerple.",
          "baselines", lower(V2, "cope", at=["longest"], train="shortest", factor=2.0), BOTH, longer="beyond/longer_training"),
    Claim("best-1024", "A", "At the longer training length, too, DAPE 1x3-Kerple is the best at every length. (Table 1)",
          "length_1024", lower(V2, ["nope", "rope", "t5", "alibi", PLAIN, "fire", DAPE]), paper="3.93 < 3.98; 3.37 < 3.41"),
    Claim("direction-1024", "A", "There Kerple rises with the length, and DAPE and DAPE 1x3 fall. (Table 1)", "length_1024",
          lambda data: [*changes(PLAIN, 1)(data), *changes([DAPE, V2], -1)(data)], longer="headline"),
    Claim("blow-up", "A", "There NoPE, RoPE, T5 and FIRE end at ten times the perplexity or more. (Table 1)", "length_1024",
          changes(["nope", "rope", "t5", "fire"], 1, factor=10.0), longer="beyond/longer_training"),
    Claim("same-tokens-rope", "4.2", "With the same tokens, DAPE 1x3-Kerple trained at T is comparable (5 %) to RoPE trained at 16 T or more.",
          "same_tokens", across((V2, 64), ("rope", 1024), (64, 1024), factor=0.95), BOTH, paper="4096: 4.95 vs 4.92; 23.19 vs 24.58"),
    Claim("same-tokens-512", "4.2", "Trained at four times T it is better than that RoPE. (Figure 3)",
          "same_tokens", across((V2, 256), ("rope", 1024), (64, 1024)), BOTH, paper="Figure 3"),
    Claim("shorter-is-enough", "4.2", "Trained at 512 it is close (5 %) to training at 4096, at 4096; here 256 and 1024.",
          "same_tokens", across((V2, 256), (V2, 1024), (1024,), factor=0.95), BOTH, paper="Figure 3"),
    Claim("overfits-length", "4.2", "Each length is read best by the model trained at it.", "same_tokens",
          lambda data: [one for n in (64, 128, 256, 512, 1024) for m in (64, 128, 256, 512, 1024) if m != n
                        for one in across((V2, n), (V2, m), (n,))(data)], BOTH, paper="Figure 3"),
    Claim("rope-overfits", "4.2", "RoPE trained at the longest length is worse at the shortest than RoPE trained there.",
          "same_tokens", across(("rope", 64), ("rope", 1024), (64,)), BOTH, paper="Figure 3"),
    Claim("cost-formula", "4.2", "With the same tokens, K times shorter windows cut the cost of attention K-fold, by its formula.",
          "step_time", exact(cost_ratio), ("computed",), paper="O(B(hdT² + hDT²))"),
    Claim("shorter-steps", "4.2", "A step on windows of T is faster than one with the same tokens on windows of 16 T.",
          "step_time", slower_when_longer(V2, 1024, 64), ("time",), paper="120.14 / 40.30 = 2.98"),
    Claim("larger-models", "4.3", "In larger models DAPE 1x3-Kerple is better than DAPE-Kerple.",
          "model_size", pairs(*((f"{V2}, {n} layers", f"{DAPE}, {n} layers") for n in (4, 6))), paper="350M: 7.63 < 7.69, 4.43 < 4.69"),
    Claim("larger-baselines", "B", "At 2.7B it is better than RoPE, T5 and Kerple. (Table 2)", "model_size",
          pairs(*((f"{V2}, {n} layers", f"{m}, {n} layers") for n in (4, 6) for m in ("rope", "t5", PLAIN))),
          paper="20.16 < 21.01, 21.10, 21.14"),
    Claim("larger-direction", "B", "At 2.7B Kerple rises with the length, and DAPE and DAPE 1x3 fall. (Table 2)", "model_size",
          lambda data: [*changes([f"{PLAIN}, {n} layers" for n in (4, 6)], 1)(data),
                        *changes([f"{m}, {n} layers" for n in (4, 6) for m in (DAPE, V2)], -1)(data)],
          paper="21.14 → 27.21; 20.52 → 19.67; 20.16 → 19.02", longer="headline"),
    Claim("every-bias", "4.4", "Kernel 3 improves ALiBi, Kerple and FIRE, within and beyond the training length.",
          "effect", pairs(*((f"dape1x3-{bias}", bias) for bias in BIASES)), paper="Figure 5"),
    Claim("conv-beats-mlp", "4.4", "Whatever the bias, kernel 3 is better than kernel 1.",
          "effect", pairs(*((f"dape1x3-{bias}", f"dape-{bias}") for bias in BIASES)), paper="Figure 5"),
    Claim("leak", "4.5", "Without the mask, ALiBi, Kerple and FIRE with kernel 3 reach perplexity 1 (here at most 1.1) up to twice the length.",
          "leakage", at_most(LEAKS, 1.1, ["train", 2]), paper="about 1", longer="beyond/longer_training"),
    Claim("leak-far", "4.5", "With the leak, Kerple's stays there up to 16 times the training length.",
          "leakage", at_most(LEAKS[1:2], 1.1, ["longest"]), paper="about 1", longer="beyond/longer_training"),
    Claim("no-leak", "4.5", "With the mask nothing leaks: decoded token by token from a cache, losses are those of one pass.",
          "code", exact(lambda data: data.frame.query("metric in ('decoded', 'followed')")["sum"].max(), 1e-4), ("computed",), ours=True),
    Claim("cheaper", "4.6", "Trained at the shorter length, kernel 3 of width 10 is better than kernel 1 of width 64.",
          "same_cost", lower(NARROW, WIDE, train="shortest"), paper="8.16 < 8.21, 4.74 < 4.87"),
    Claim("cheaper-longer", "4.6", "Trained at the longer length as well, up to eight times that length.",
          "same_cost", lower(NARROW, WIDE, train="longest", at=["train", 8]), paper="Figure 7"),
    Claim("same-cost", "4.6", "Kernel 3 of width 21, at the same cost, is always better than kernel 1 of width 64.",
          "same_cost", lower(MIDDLE, WIDE), paper="Figure 7"),
    Claim("larger-kernels", "4.7", "On Arxiv a larger kernel is always better: 1, 3, 5, 7.", "kernel_size", ordered(KERNELS)),
    Claim("kernel-3-books", "4.7", "On Books3, trained at the shorter length, kernel 3 is the best at the longest input.",
          "kernel_size", lower(V2, [k for k in KERNELS if k != V2], at=["longest"], train="shortest"), ("books",)),
    Claim("kernel-5-books", "4.7", "On Books3, trained at the longer length, kernel 5 is the best at the longest input.",
          "kernel_size", lower(KERNELS[2], [k for k in KERNELS if k != KERNELS[2]], at=["longest"], train="longest"), ("books",)),
    Claim("largest-not-best", "D", "At the longest input the largest kernel is not always the best.",
          "kernel_size", some_lower(KERNELS[:3], KERNELS[3]), ("books",)),
    Claim("some-kernel-helps", "4.8", "Some kernel size is better than leaving the scores as they are.",
          "kernel_size", some_lower(KERNELS, PLAIN, at=["train", "longest"]), BOTH),
    Claim("che-missing", "4.8", "On missing duplicate, kernel 3 solves more than kernel 1.",
          "che", more_accurate(V2, DAPE, ["missing_duplicate_string"]), ("tasks",), paper="99.65 > 87.57"),
    Claim("che-stack", "4.8", "On stack manipulation, kernel 3 is worse than kernel 1.",
          "che", more_accurate(DAPE, V2, ["stack_manipulation"]), ("tasks",), paper="68.18 < 72.04"),
    Claim("che-even-pairs", "E", "On even pairs, kernel 3 solves the task and plain Kerple guesses. (Table 5)",
          "che", more_accurate(V2, PLAIN, ["even_pairs"], by=30.0), ("tasks",), paper="57.50 / 99.58 / 100"),
    Claim("che-even-pairs-dape", "E", "On even pairs, kernel 1 solves the task as well. (Table 5)",
          "che", more_accurate(DAPE, PLAIN, ["even_pairs"], by=30.0), ("tasks",), paper="57.50 / 99.58 / 100"),
    Claim("che-8-of-11", "4.8", "With Kerple, kernel 3 beats plain scores on 8 of 11 tasks in which order matters.",
          "che", more_accurate(V2, PLAIN, ORDER), ("tasks",), paper="8 of 11",
          needs="only five of the eleven tasks were trained for 5,000 steps; the paper has 200,000"),
    Claim("che-fire-6-of-11", "4.8", "With FIRE, kernel 3 beats plain scores on 6 of those 11.",
          "che", more_accurate("dape1x3-fire", "fire", ORDER), ("tasks",), paper="6 of 11", needs="FIRE was not trained on these tasks"),
    Claim("cost-order", "4.9", "A step with kernel 3 takes longer than with kernel 1, and that longer than Kerple's.",
          "time_cost", lambda data: [*slower(V2, DAPE)(data), *slower(DAPE, PLAIN)(data)], ("time",), paper="252.84 > 224.22 > 189.91"),
    Claim("cost-falls", "4.9", "The larger the model, the less kernel 3 adds to Kerple's time.",
          "time_cost", overhead_falls(V2, PLAIN, "tiny", "125m"), ("time",), paper="1.33, 1.22, 1.12"),
    Claim("t5-slower", "F", "A step with T5's bias takes longer than with kernel 3, at every size. (Table 6)",
          "time_cost", slower("t5", V2), ("time",), paper="1.40, 1.19, 1.09"),
    Claim("best-adaptive", "H", "Of encodings that adapt to the data, DAPE 1x3-Kerple is the best: Transformer-XL, CoPE, DAPE. (Table 8)",
          "data_adaptive", lower(V2, ["transformer-xl", "cope", DAPE]), ("books",)),
    Claim("adaptive-not-enough", "H", "Being adaptive is not enough: Transformer-XL and CoPE rise with the length. (Table 8)",
          "data_adaptive", changes(["transformer-xl", "cope"], 1), ("books",), longer="beyond/longer_training"),
    Claim("sink", "I", "Kernel 3 gives the first token more weight than kernel 1: a more pronounced sink.",
          "visualisation", sink(V2, DAPE), paper="maps"),
    Claim("recall-constructed", "3.3", "One layer with kernel 1x2, weights −1 and 1, recalls without positions, by construction.",
          "recall", accurate(["dape1x2-nope, 1 layer"], ["construction"], 99.0), ("tasks",), paper="proved"),
    Claim("recall-learned", "3.3", "One layer with a convolution learns associative recall without positions (90 %).",
          "recall", accurate(["dape1x2-nope, 1 layer", "dape1x3-nope, 1 layer"], ["associative_recall"], 90.0), ("tasks",), paper="–"),
    Claim("recall-needs-convolution", "5", "Without the convolution one layer does not: plain scores and kernel 1 are worse.",
          "recall", more_accurate("dape1x3-nope, 1 layer", ["nope, 1 layer", "dape-nope, 1 layer"], ["associative_recall"]), ("tasks",), paper="–"),
    Claim("linear-convolution", "3.3", "A linear convolution of the scores along the keys equals convolving the keys.",
          "step_time", exact(linear_convolution), ("computed",), paper="stated"),
    Claim("values", "4.1–4.3, 4.6, A, B, D, H", "The printed perplexities themselves, such as 4.60 on Arxiv and 23.52 on Books3 at 8192.",
          "headline", lambda data: [], paper="145 numbers", needs="it needs the paper's models, text and 50 thousand steps: `--scale paper`"),
]  # fmt: skip
