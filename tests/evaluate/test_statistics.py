"""Standard errors over documents, against computations by hand."""

import math

import numpy as np
import pytest

from dape.evaluate import LengthLoss, clustered_mean, paired_difference


def score(windows, documents, *, length=64, ends=None, last=8):
    windows = np.array(windows, float)
    ends = np.arange(len(windows)) if ends is None else np.array(ends)
    return LengthLoss.of(length, windows, np.array(documents), ends, last)


def test_one_window_a_document_is_the_textbook_formula():
    values = np.array([1.0, 2.0, 4.0, 9.0])
    mean, error = clustered_mean(values, np.ones(4), np.arange(4))
    assert mean == 4.0
    assert error == pytest.approx(values.std(ddof=1) / 2)


def test_windows_of_a_document_count_together():
    # Mean 3; residuals of document 0: −2 − 1 = −3, of document 1: 0 + 3 = 3. √(2/1 · (9 + 9)) / 4 = 1.5.
    mean, error = clustered_mean(np.array([1.0, 2.0, 3.0, 6.0]), np.ones(4), np.array([7, 7, 9, 9]))
    assert (mean, error) == (3.0, pytest.approx(1.5))


def test_repeating_windows_does_not_make_the_error_smaller():
    values, documents = np.array([1.0, 2.0, 6.0]), np.arange(3)
    once = clustered_mean(values, np.ones(3), documents)
    often = clustered_mean(values.repeat(50), np.ones(150), documents.repeat(50))
    assert often == pytest.approx(once)


def test_documents_of_different_sizes():
    # Sums 10 and 2 over 4 and 4 tokens: mean 1.5, residuals 4 and −4: √(2 · 32) / 8 = 1.
    assert clustered_mean(np.array([10.0, 2.0]), np.array([4, 4]), np.array([0, 1])) == (
        1.5,
        pytest.approx(1.0),
    )


def test_one_document_says_nothing_of_the_spread():
    mean, error = clustered_mean(np.array([1.0, 3.0]), np.ones(2), np.zeros(2))
    assert mean == 2.0
    assert math.isnan(error)


def test_paired_difference_is_the_error_of_the_differences():
    a, b = score([2.0, 3.0, 5.0, 8.0], [0, 0, 1, 1]), score([1.0, 2.5, 4.0, 6.5], [0, 0, 1, 1])
    # Differences 1, .5, 1, 1.5: mean 1; residuals −.5 and .5: √(2 · .5) / 4 = .25.
    assert paired_difference(a, b) == (pytest.approx(1.0), pytest.approx(0.25))
    assert paired_difference(a, b)[1] < min(a.nll_se, b.nll_se)
    assert paired_difference(b, a)[0] == pytest.approx(-1.0)


def test_differences_of_other_tokens_are_refused():
    a = score([1.0, 2.0], [0, 1])
    with pytest.raises(ValueError, match="different target tokens"):
        paired_difference(a, score([1.0, 2.0], [0, 1], ends=[0, 2]))
    with pytest.raises(ValueError, match="different target tokens"):
        paired_difference(a, score([1.0, 2.0], [0, 1], last=4))


def test_perplexity_of_a_broken_model_is_infinite():
    assert score([1e4, 1e4], [0, 1]).ppl == math.inf


def test_record_is_plain():
    record = score([1.0, 3.0], [0, 1]).record()
    assert record == {
        "eval_length": 64,
        "nll": 2.0,
        "nll_se": pytest.approx(1.0),
        "ppl": pytest.approx(math.exp(2)),
        "tokens": 16,
        "windows": 2,
        "documents": 2,
        "last": 8,
    }
