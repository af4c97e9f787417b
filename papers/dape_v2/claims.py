"""Claims of the paper, in our words, each with the rule that decides it (dape/lab/rules.py)."""

from dape.lab.claims import claim
from dape.lab.rules import (
    Pick,
    accuracy_bound,
    at_most,
    best_is_among,
    best_train_length,
    best_varies,
    best_varies_by_task,
    falls,
    gain_grows,
    gain_is_recall,
    gains_more_on_hits,
    lower,
    matches_paper,
    more_accurate,
    near,
    ordered,
    overhead_falls,
    recalls_more,
    rises,
    sink_higher,
    slower,
    slower_when_longer,
    some_lower,
)

ORDER_MATTERS = [
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
ALL_TASKS = [
    "even_pairs",
    "modular_arithmetic",
    "parity_check",
    "cycle_navigation",
    "stack_manipulation",
    "reverse_string",
    "modular_arithmetic_brackets",
    "solve_equation",
    "duplicate_string",
    "missing_duplicate_string",
    "odds_first",
    "binary_addition",
    "compute_sqrt",
    "bucket_sort",
]
KERNELS = ["dape-kerple", "dape1x3-kerple", "dape1x5-kerple", "dape1x7-kerple"]
BOTH = ["arxiv", "books3"]
BIASES = ["alibi", "kerple", "fire"]
WIDTHS = (Pick("dape1x3-kerple", variant="width 10"), Pick("dape-kerple", variant="width 64"))
BASELINES = ["nope", "rope", "t5", "alibi", "kerple", "fire", "cope", "dape-kerple"]


def over(processor, methods):
    """Pairs of each method's encoding with that processor, and the method."""
    return [(f"{processor}-{method.removeprefix('dape-')}", method) for method in methods]


def best_kernel(data, kernel, train):
    others = [other for other in KERNELS if other != kernel]
    return lower(data, kernel, others, corpus="books3", train=train, at="longest")


@claim("headline", "1")
def rope_degrades(data):
    """RoPE gets notably worse as soon as the input is twice as long as in training (threshold: 5 %)."""
    return rises(data, "rope", at=[2], factor=1.05)


@claim("headline", "1", closer="dape_v2/rope-fails-far")
def rope_fails(data):
    """At twice the training length RoPE fails altogether (threshold: twice the perplexity)."""
    return rises(data, "rope", at=[2], factor=2.0)


@claim("headline", "4.1")
def rope_fails_far(data):
    """From four times the training length on, RoPE has at least twice the perplexity. (Read off the figure.)"""
    return rises(data, "rope", at=[4, 8, 16, 32], factor=2.0)


@claim("headline", "1")
def alibi_kerple_degrade(data):
    """ALiBi and Kerple, too, lose quality beyond the training length (on LaTeX, in place of Arxiv)."""
    return rises(data, ["alibi", "kerple"], corpus="arxiv")


@claim("headline", "4.1")
def headline_best(data):
    """Trained on 8 million tokens of LaTeX, in place of Arxiv, DAPE 1x3-Kerple is the best of six methods at every length."""
    return lower(data, "dape1x3-kerple", ["rope", "alibi", "kerple", "fire", "dape-kerple"], corpus="arxiv")


@claim("headline", "4.1")
def headline_best_on_books(data):
    """Trained on 8 million tokens of books, DAPE 1x3-Kerple is the best of four methods at every length."""
    return lower(data, "dape1x3-kerple", ["rope", "kerple", "dape-kerple"], corpus="books3")


@claim("headline", "4.1")
def improves_with_length(data):
    """DAPE 1x3-Kerple makes use of more context than it was trained on: its perplexity at the longest inputs
    is below that at the training length. (Read off the figure.)
    """
    return falls(data, "dape1x3-kerple", corpus=BOTH)


@claim("headline", "Appendix H")
def adaptive_improves_with_length(data):
    """With kernels 1 and 3, perplexity at the longest inputs is below that at the training length. (Read off
    the table.)
    """
    return falls(data, ["dape-kerple", "dape1x3-kerple"])


@claim("headline", "4.1")
def beats_dape_far(data):
    """At the longest input, DAPE 1x3-Kerple is better than DAPE-Kerple, on both corpora."""
    return lower(data, "dape1x3-kerple", "dape-kerple", corpus=BOTH, train="shortest", at="longest")


@claim("headline", "4.1")
def headline_kernel_1(data):
    """Trained on 8 million tokens, kernel 1 (DAPE) is better than plain Kerple at every length. (Read off the
    figure.)
    """
    return lower(data, "dape-kerple", "kerple")


@claim("headline", "4.1", closer="dape_v2/alibi-kerple-degrade")
def headline_kerple_blows_up(data):
    """Trained on 8 million tokens, plain Kerple gets worse beyond the training length (threshold: 10 % at the
    longest input; read off the figure).
    """
    return rises(data, "kerple", factor=1.1)


@claim("headline", "3.3", closer="dape_v2/gain-per-token-is-recall")
def gain_is_mostly_recall(data):
    """Perplexity is mostly recall, so that the gain should be: more than half of the gain of kernel 3 over
    plain Kerple is on tokens whose trigram the input has already shown.
    """
    return gain_is_recall(data, "dape1x3-kerple", "kerple")


@claim("headline", "3.3", closer="dape_v2/longer-context-is-recalled", ours=True)
def gain_per_token_is_recall(data):
    """Per token, the gain of kernel 3 over plain Kerple is larger where the input has already shown the trigram
    than on all other tokens.
    """
    return gains_more_on_hits(data, "dape1x3-kerple", "kerple")


@claim("headline", "3.3", ours=True)
def longer_context_is_recalled(data):
    """On tokens that can be copied only from beyond the training length, the loss of kernel 3 falls more than
    that of plain Kerple.
    """
    return recalls_more(data, "dape1x3-kerple", "kerple")


@claim("headline", "4.9", ours=True)
def headline_equal_time(data):
    """Trained on LaTeX for the same time as plain Kerple, kernel 3 is better at every length. (The paper
    reports the time of a step.)
    """
    return lower(data, "dape1x3-kerple", "kerple", corpus="arxiv", view="equal-time")


@claim("nope_rope", "3.2")
def nope_mlp(data):
    """Processing the scores of a model without any position encoding, each position separately over all heads
    (DAPE, kernel 1), already improves it, within and beyond the training length.
    """
    return lower(data, "dape-nope", "nope")


@claim("nope_rope", "4.4")
def nope_conv(data):
    """Without a position encoding, convolving the scores with kernel 3 lowers perplexity within and beyond
    the training length.
    """
    return lower(data, "dape1x3-nope", "nope")


@claim("nope_rope", "1", scale="paper")
def nope_600_to_100(data):
    """Trained at 128 tokens and evaluated at 8192, processing the scores brings perplexity down from over 600 to
    little more than 100: by a factor of at least five. (Of NoPE, as we read it.)
    """
    return lower(data, "dape1x3-nope", "nope", train="shortest", at="longest", factor=5.0)


@claim("nope_rope", "4.4", closer="beyond/longer-kernel-1-hurts-rope")
def rope_mlp_hurts(data):
    """Kernel 1 (DAPE) makes RoPE worse, at both training lengths."""
    return lower(data, "rope", "dape-rope")


@claim("nope_rope", "4.4")
def rope_conv_within(data):
    """Kernel 3 improves RoPE at the training length."""
    return lower(data, "dape1x3-rope", "rope", at="within")


@claim("nope_rope", "4.4")
def rope_conv_beyond(data):
    """Kernel 3 improves RoPE at every length beyond the training length."""
    return lower(data, "dape1x3-rope", "rope", at="beyond")


@claim("nope_rope", "3.2")
def rope_conv_gain_grows(data):
    """The gain of kernel 3 over plain RoPE is largest at long inputs."""
    return gain_grows(data, "dape1x3-rope", "rope")


@claim("nope_rope", "3")
def rope_kernel_matters(data):
    """For RoPE it takes the larger kernel: kernel 3 is better than kernel 1."""
    return lower(data, "dape1x3-rope", "dape-rope")


@claim("baselines", "4.1", closer="beyond/longer-kernel-3-best")
def best_within(data):
    """DAPE 1x3-Kerple is the best of all methods at the training length, on both corpora and for both
    training lengths.
    """
    return lower(data, "dape1x3-kerple", BASELINES, corpus=BOTH, at="train")


@claim("baselines", "4.1", closer="beyond/longer-kernel-3-best")
def best_beyond(data):
    """DAPE 1x3-Kerple is the best of all methods at every length beyond the training length, on both corpora
    and for both training lengths.
    """
    return lower(data, "dape1x3-kerple", BASELINES, corpus=BOTH, at="beyond")


@claim("baselines", "4.1", closer="beyond/longer-cope-poor")
def cope_poor(data):
    """CoPE does poorly far beyond the training length: several times the perplexity of DAPE 1x3-Kerple
    (threshold: twice).
    """
    return lower(data, "dape1x3-kerple", "cope", corpus=BOTH, train="shortest", at="longest", factor=2.0)


@claim("baselines", "4.1", scale="paper")
def values_at_512(data):
    """Trained and evaluated at 512 tokens of Arxiv: perplexity 4.44 for DAPE 1x3-Kerple, 4.49 for DAPE-Kerple,
    4.51 for CoPE, 4.57 for Kerple and for RoPE.
    """
    return matches_paper(
        data,
        ["dape1x3-kerple", "dape-kerple", "cope", "kerple", "rope"],
        corpus="arxiv",
        train_length=512,
        lengths=[512],
    )


@claim("baselines", "4.1", scale="paper")
def values_at_8192(data):
    """Trained at 128 and evaluated at 8192: perplexity 4.60 (Arxiv) and 23.52 (Books3) for DAPE 1x3-Kerple, 4.97
    and 25.01 for DAPE-Kerple, 29.86 and 90.66 for CoPE.
    """
    return matches_paper(
        data, ["dape1x3-kerple", "dape-kerple", "cope"], corpus=BOTH, train_length=128, lengths=[8192]
    )


@claim("length_1024", "Appendix A")
def best_long_training(data):
    """At the longer training length DAPE 1x3-Kerple is again the best of all methods, at every length. (Read
    off the table.)
    """
    return lower(data, "dape1x3-kerple", ["nope", "rope", "t5", "alibi", "kerple", "fire", "dape-kerple"])


@claim("length_1024", "Appendix A")
def improves_long_training(data):
    """At the longer training length, too, the perplexity of DAPE 1x3-Kerple goes on falling up to the
    longest inputs. (Read off the table.)
    """
    return falls(data, "dape1x3-kerple")


@claim("length_1024", "Appendix A", closer="beyond/longer-blow-up")
def blow_up_long_training(data):
    """Trained at the longer length, NoPE, RoPE, T5's bias and FIRE break down at the longest inputs (at
    least ten times the perplexity). (Read off the table.)
    """
    return rises(data, ["nope", "rope", "t5", "fire"], factor=10.0)


@claim("same_tokens", "4.2", closer="beyond/longer-short-training-matches-rope")
def short_training_matches_rope(data):
    """For the same number of training tokens, DAPE 1x3-Kerple trained at the shortest length is as good as
    RoPE trained at the longest (at most 5 % worse), at short and long inputs.
    """
    return lower(
        data,
        Pick("dape1x3-kerple", train="shortest"),
        Pick("rope", train="longest"),
        train="shortest",
        at="all",
        factor=0.95,
    )


@claim("same_tokens", "4.2")
def middle_training_beats_rope(data):
    """For the same number of training tokens, DAPE 1x3-Kerple trained at four times the shortest length is
    even better than RoPE trained at the longest.
    """
    return lower(
        data, Pick("dape1x3-kerple", train="4x"), Pick("rope", train="longest"), train="shortest", at="all"
    )


@claim("same_tokens", "4.2")
def shorter_is_enough(data):
    """At the longest inputs, DAPE 1x3-Kerple trained at four times the shortest length comes close to one
    trained at the longest (at most 5 % worse).
    """
    return lower(
        data,
        Pick("dape1x3-kerple", train="4x"),
        Pick("dape1x3-kerple", train="longest"),
        train="shortest",
        at="longest",
        factor=0.95,
    )


@claim("same_tokens", "4.2")
def long_trainings_alike(data):
    """The curves of DAPE 1x3-Kerple trained at eight and at sixteen times the shortest length are almost the
    same (5 %).
    """
    return near(
        data,
        Pick("dape1x3-kerple", train="8x"),
        Pick("dape1x3-kerple", train="16x"),
        train="shortest",
        at="all",
        within=1.05,
    )


@claim("same_tokens", "4.2", closer="beyond/longer-overfits-training-length")
def overfits_training_length(data):
    """For the same number of training tokens, each length is read best by the DAPE 1x3-Kerple that was
    trained at just that length.
    """
    return best_train_length(data, "dape1x3-kerple")


@claim("same_tokens", "4.2")
def rope_overfits_training_length(data):
    """RoPE trained at the longest length is worse at the shortest inputs than RoPE trained at them."""
    return lower(
        data, Pick("rope", train="shortest"), Pick("rope", train="longest"), train="shortest", at="train"
    )


@claim("step_time", "4.2")
def short_training_is_faster(data):
    """With the same tokens in a step, training at the shortest length takes less time than at sixteen times it."""
    return slower_when_longer(data, "dape1x3-kerple", times=16)


@claim("step_time", "4.2")
def short_training_takes_half(data):
    """With the same tokens in a step, one at sixteen times the length takes at least twice as long (the paper: 3.0
    times).
    """
    return slower_when_longer(data, "dape1x3-kerple", times=16, factor=2.0)


@claim("same_tokens", "4.2", scale="paper")
def values_same_tokens(data):
    """For the same number of training tokens, DAPE 1x3-Kerple trained at 128 has perplexity 8.15 at 128 and
    4.95 at 4096 on Arxiv, 31.07 and 23.19 on Books3.
    """
    return matches_paper(data, ["dape1x3-kerple"], corpus=BOTH, train_length=128, lengths=[128, 4096])


@claim("same_tokens", "4.2", scale="paper")
def values_same_tokens_rope(data):
    """For the same number of training tokens, RoPE trained at 4096 has perplexity 9.59 at 128 and 4.92 at
    4096 on Arxiv, 38.36 and 24.58 on Books3.
    """
    return matches_paper(data, ["rope"], corpus=BOTH, train_length=4096, lengths=[128, 4096])


@claim("model_size", "4.3")
def larger_models(data):
    """In larger models, too, DAPE 1x3-Kerple is better than DAPE-Kerple, at every length."""
    return lower(data, "dape1x3-kerple", "dape-kerple", at="all")


@claim("model_size", "Appendix B")
def larger_models_baselines(data):
    """In larger models, too, DAPE 1x3-Kerple is better than RoPE, T5's bias and Kerple at every length. (Read
    off the table.)
    """
    return lower(data, "dape1x3-kerple", ["rope", "t5", "kerple"], at="all")


@claim("model_size", "4.3", scale="paper")
def values_350m(data):
    """With 350M parameters and trained at 128: perplexity 7.63 at 128 and 4.43 at 8192 for DAPE 1x3-Kerple,
    7.69 and 4.69 for DAPE-Kerple.
    """
    return matches_paper(
        data,
        ["dape1x3-kerple", "dape-kerple"],
        variants=["350m"],
        corpus="arxiv",
        train_length=128,
        lengths=[128, 8192],
    )


@claim("model_size", "4.3", scale="paper")
def values_350m_512(data):
    """With 350M parameters and trained at 512: perplexity 4.10 and 3.35 for DAPE 1x3-Kerple, 4.14 and 3.44
    for DAPE-Kerple, at 128 and 8192.
    """
    return matches_paper(
        data,
        ["dape1x3-kerple", "dape-kerple"],
        variants=["350m"],
        corpus="arxiv",
        train_length=512,
        lengths=[128, 8192],
    )


@claim("model_size", "Appendix B", scale="paper")
def values_2_7b(data):
    """With 2.7B parameters on Books3: perplexity 20.16 at 512 and 19.02 at 4096 for DAPE 1x3-Kerple, while
    Kerple goes from 21.14 to 27.21.
    """
    return matches_paper(
        data,
        ["dape1x3-kerple", "kerple"],
        variants=["2.7b"],
        corpus="books3",
        train_length=512,
        lengths=[512, 4096],
    )


@claim("effect", "4.4")
def every_bias_within(data):
    """Kernel 3 improves ALiBi, Kerple and FIRE at the training length."""
    return lower(data, pairs=over("dape1x3", BIASES), at="within")


@claim("effect", "4.4")
def every_bias_beyond(data):
    """Kernel 3 improves ALiBi, Kerple and FIRE at every length beyond the training length."""
    return lower(data, pairs=over("dape1x3", BIASES), at="beyond")


@claim("effect", "4.4")
def conv_beats_mlp(data):
    """Whatever the additive encoding, kernel 3 is better than kernel 1 (DAPE)."""
    return lower(data, pairs=over("dape1x3", [f"dape-{name}" for name in BIASES]))


@claim("effect", "4.9", closer="dape_v2/headline-equal-time", ours=True)
def short_equal_time(data):
    """After a short training of the same time as plain Kerple's (500 steps on windows of 64 tokens), kernel 3 is
    better at every length.
    """
    return lower(data, "dape1x3-kerple", "kerple", view="equal-time")


@claim("leakage", "4.5", closer="beyond/longer-leak")
def leak_near_zero(data):
    """If the scores are not masked before the convolution, so that it sees the future, ALiBi, Kerple and
    FIRE with kernel 3 all reach almost no loss (perplexity at most 1.1) up to twice the training length.
    """
    leaks = [Pick(f"dape1x3-{name}", variant="leak") for name in BIASES]
    return at_most(data, leaks, 1.1, at=[1, 2])


@claim("leakage", "4.5", closer="beyond/longer-leak-far")
def leak_kerple_far(data):
    """With that leak, DAPE 1x3-Kerple keeps its loss near zero (perplexity at most 1.1) up to sixteen times
    the training length.
    """
    return at_most(data, Pick("dape1x3-kerple", variant="leak"), 1.1, at=[1, 2, 4, 8, 16])


@claim("same_cost", "4.6")
def cheaper_and_better(data):
    """Trained at the shorter length, kernel 3 with width 10, which costs less, is better than kernel 1 with
    width 64, at the training length and at the longest.
    """
    return lower(data, *WIDTHS, train="shortest", at=["train", "longest"])


@claim("same_cost", "4.6")
def cheaper_and_better_longer(data):
    """Trained at the longer length, kernel 3 with width 10 is better than kernel 1 with width 64 up to eight
    times that length.
    """
    return lower(data, *WIDTHS, train="longest", at=[1, 2, 4, 8])


@claim("same_cost", "4.6")
def same_cost_always_better(data):
    """At the same cost (width 21 against 64), kernel 3 is always better than kernel 1."""
    return lower(data, Pick("dape1x3-kerple", variant="width 21"), WIDTHS[1])


@claim("same_cost", "4.6", scale="paper")
def values_same_cost(data):
    """Trained at 128: perplexity 8.16 at 128 and 4.74 at 8192 for kernel 3 with width 10, 8.21 and 4.87 for
    kernel 1 with width 64.
    """
    return matches_paper(
        data,
        ["dape1x3-kerple", "dape-kerple"],
        variants=["width 10", "width 64"],
        corpus="arxiv",
        train_length=128,
        lengths=[128, 8192],
    )


@claim("kernel_size", "4.7")
def larger_kernels_arxiv(data):
    """On Arxiv a larger kernel is always better: from 1 to 3 to 5 to 7, at both training lengths."""
    return ordered(data, KERNELS, corpus="arxiv", at="all")


@claim("kernel_size", "4.7")
def kernel_1_helps(data):
    """Kernel 1 (DAPE) is better than plain Kerple, on both corpora and at both training lengths. (Read off the
    figure.)
    """
    return lower(data, "dape-kerple", "kerple")


@claim("kernel_size", "4.7", closer="beyond/longer-alibi-kerple-degrade")
def kerple_blows_up(data):
    """Plain Kerple gets worse beyond the training length (threshold: 10 % at the longest input; read off
    the figure).
    """
    return rises(data, "kerple", factor=1.1)


@claim("kernel_size", "4.7")
def kernel_3_books(data):
    """On Books3, trained at the shorter length and evaluated at the longest, kernel 3 is the best."""
    return best_kernel(data, "dape1x3-kerple", train="shortest")


@claim("kernel_size", "4.7")
def kernel_5_books(data):
    """On Books3, trained at the longer length and evaluated at the longest, kernel 5 is the best."""
    return best_kernel(data, "dape1x5-kerple", train="longest")


@claim("kernel_size", "Appendix D")
def largest_not_always_best(data):
    """The largest kernel is not always the best, especially at long inputs."""
    return some_lower(
        data,
        ["dape-kerple", "dape1x3-kerple", "dape1x5-kerple"],
        "dape1x7-kerple",
        at="longest",
        need="some",
        unit="settings",
    )


@claim("kernel_size", "4.7")
def best_kernel_varies(data):
    """Different corpora and training lengths have different best kernels."""
    return best_varies(data, KERNELS, at="longest")


@claim("kernel_size", "4.8")
def some_kernel_helps(data):
    """In most settings, some kernel size is better than leaving the scores as they are."""
    return some_lower(data, KERNELS, "kerple", at="all", need="most")


@claim("che", "4.8")
def che_missing_duplicate(data):
    """On the missing-duplicate task kernel 3 with Kerple solves more than kernel 1."""
    return more_accurate(data, "dape1x3-kerple", "dape-kerple", tasks="missing_duplicate_string")


@claim("che", "4.8")
def che_stack(data):
    """On stack manipulation kernel 3 with Kerple is worse than kernel 1."""
    return more_accurate(data, "dape-kerple", "dape1x3-kerple", tasks="stack_manipulation")


@claim("che", "4.8")
def che_best_kernel_varies(data):
    """Different tasks have different best kernel sizes."""
    return best_varies_by_task(data, ["dape-kerple", "dape1x3-kerple"])


@claim("che", "4.8")
def che_kerple_8_of_11(data):
    """With Kerple, kernel 3 is better than plain scores on 8 of the 11 tasks in which order matters."""
    return more_accurate(data, "dape1x3-kerple", "kerple", tasks=ORDER_MATTERS, need=8)


@claim("che", "4.8")
def che_fire_6_of_11(data):
    """With FIRE, kernel 3 is better than plain scores on 6 of the 11 tasks in which order matters."""
    return more_accurate(data, "dape1x3-fire", "fire", tasks=ORDER_MATTERS, need=6)


@claim("che", "4.8")
def che_processing_usually_best(data):
    """The best method of a task usually processes the scores, with kernel 1 or 3 (on more than half of the
    14 tasks).
    """
    return best_is_among(
        data,
        ["dape-alibi", "dape-kerple", "dape-fire", "dape1x3-alibi", "dape1x3-kerple", "dape1x3-fire"],
        ["rope", "relative", "alibi", "kerple", "fire"],
        tasks=ALL_TASKS,
        need=8,
    )


@claim("che", "4.8")
def che_kerple_usually_best(data):
    """With Kerple, one of the kernels 1 and 3 usually beats plain scores: on more than half of the tasks
    that were run.
    """
    return best_is_among(data, ["dape-kerple", "dape1x3-kerple"], ["kerple"], need="most")


@claim("time_cost", "4.9")
def cost_order(data):
    """Kernel 3 takes longer than kernel 1 (DAPE), and longer than plain Kerple."""
    return slower(data, "dape1x3-kerple", ["dape-kerple", "kerple"])


@claim("time_cost", "4.9")
def cost_order_dape(data):
    """Kernel 1 (DAPE), too, takes longer than plain Kerple."""
    return slower(data, "dape-kerple", "kerple")


@claim("time_cost", "4.9")
def cost_falls_kerple(data):
    """The larger the model, the less kernel 3 adds to Kerple's time, relative to it."""
    return overhead_falls(data, "dape1x3-kerple", "kerple")


@claim("time_cost", "4.9")
def cost_falls_dape(data):
    """The larger the model, the less kernel 3 adds to the time of kernel 1, relative to it."""
    return overhead_falls(data, "dape1x3-kerple", "dape-kerple")


@claim("data_adaptive", "Appendix H")
def best_of_adaptive(data):
    """Of the encodings that adapt to the data, DAPE 1x3-Kerple is the best at every length: better than
    Transformer-XL's, CoPE and DAPE-Kerple. (Read off the table.)
    """
    return lower(data, "dape1x3-kerple", ["transformer-xl", "cope", "dape-kerple"])


@claim("data_adaptive", "Appendix H", closer="beyond/longer-adaptive-alone")
def adaptive_alone_not_enough(data):
    """Being adaptive is not enough: Transformer-XL's encoding and CoPE are worse at the longest inputs than
    at the training length. (Read off the table.)
    """
    return rises(data, ["transformer-xl", "cope"])


@claim("visualisation", "Appendix I")
def sink(data):
    """Kernel 3 seems to show a stronger attention sink than kernel 1: more of the weight goes to the first token."""
    return sink_higher(data, "dape1x3-kerple", "dape-kerple")


@claim("recall", "3.3")
def recall_by_construction(data):
    """A convolution over two neighbouring keys with weights −1 and 1 makes one attention layer without
    positions recall what followed a token, by construction.
    """
    return accuracy_bound(data, "dape1x2-nope", least=0.99, tasks="construction")


@claim("recall", "3.3")
def recall_by_training(data):
    """One layer with a convolution of the scores learns associative recall without any position encoding (at
    least 90 % at every length).
    """
    return accuracy_bound(
        data, ["dape1x2-nope", "dape1x3-nope"], least=0.9, tasks="associative_recall", layers=1
    )


@claim("recall", "5")
def recall_not_without(data):
    """Without the convolution one layer does not: kernel 3 is more accurate than plain scores, and than
    kernel 1.
    """
    return more_accurate(data, "dape1x3-nope", ["nope", "dape-nope"], tasks="associative_recall", layers=1)
