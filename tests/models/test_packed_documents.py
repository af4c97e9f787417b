"""Packed documents: positions that start again begin a document, and documents do not see each other."""

import pytest
import torch
from test_decoder import tiny
from transformers import DataCollatorWithFlattening, DynamicCache

LENGTHS = (3, 1, 6, 2)


def positions(lengths=LENGTHS):
    return torch.cat([torch.arange(length) for length in lengths])[None]


def alone(model, ids, lengths=LENGTHS):
    """The logits of each document read by itself, one after another."""
    return torch.cat([model(part, use_cache=False).logits for part in ids.split(lengths, 1)], 1)


@pytest.mark.parametrize("method", ["dape1x3-kerple", "dape1x3-fire", "rope"])
@pytest.mark.parametrize("padding", ["left", "right", "between"])
def test_packed_documents_beside_padding(method, padding):
    model, ids = tiny(method), torch.randint(0, 40, (1, 10))
    hidden = {"left": [0, 1], "right": [8, 9], "between": [2, 6]}[padding]
    real = torch.ones(1, 10, dtype=torch.long)
    real[:, hidden] = 0
    # What stands at padding, here as generate would fill it, must not begin a document.
    places = torch.ones(1, 10, dtype=torch.long)
    places[real.bool()] = positions((3, 5))[0]
    told = model(ids, attention_mask=real, position_ids=places).logits[real.bool()]
    torch.testing.assert_close(told, alone(model, ids[real.bool()][None], (3, 5))[0], rtol=1e-10, atol=1e-10)


def test_gaps_between_positions_begin_no_document():
    model, ids = tiny("dape1x3-fire"), torch.randint(0, 40, (1, 6))
    spread = torch.tensor([[0, 4, 5, 9, 20, 21]])
    before, after = (model(tokens, position_ids=spread).logits for tokens in (ids, ids.roll(1, 1)))
    assert not torch.allclose(before[:, -1], after[:, -1])
    changed = ids.clone()
    changed[0, 0] = (ids[0, 0] + 1) % 40
    assert not torch.allclose(model(changed, position_ids=spread).logits[0, -1], before[0, -1])


def test_the_collator_of_transformers_packs_for_it():
    model, documents = tiny(), [torch.randint(0, 40, (n,)).tolist() for n in LENGTHS]
    batch = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": d} for d in documents])
    told = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    torch.testing.assert_close(told, alone(model, batch["input_ids"]), rtol=1e-10, atol=1e-10)
    # The lengths alone, without positions, say the same and must not be dropped.
    batch = DataCollatorWithFlattening(
        return_tensors="pt", return_position_ids=False, return_flash_attn_kwargs=True
    )([{"input_ids": d} for d in documents])
    with pytest.raises(ValueError, match="cu_seq_lens_q without position_ids"):
        model(**batch)


def test_packed_documents_are_not_continued_from_a_cache():
    model, ids = tiny(), torch.randint(0, 40, (1, sum(LENGTHS)))
    assert model(ids, position_ids=positions()).past_key_values is None
    for options in ({"use_cache": True}, {"past_key_values": DynamicCache(config=model.config)}):
        with pytest.raises(ValueError, match=r"position_ids start again .* a cache would mix the documents"):
            model(ids, position_ids=positions(), **options)


def test_packed_documents_compile():
    model, ids = tiny(), torch.randint(0, 40, (1, sum(LENGTHS)))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    told = compiled(ids, position_ids=positions(), use_cache=False).logits
    torch.testing.assert_close(told, alone(model, ids), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", ["dape1x3-kerple", "dape1x3-fire", "rope"])
@pytest.mark.parametrize("kind", ["bool", "long", "float"])
def test_a_mask_of_intervals_is_what_it_shows(method, kind):
    model, ids = tiny(method), torch.randint(0, 40, (2, 8))
    shown = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    shown[1, :, 5:, :5] = False
    shown[0, :, 7, :3] = False
    mask = shown if kind == "bool" else shown.long()
    if kind == "float":
        mask = torch.zeros(2, 1, 8, 8).masked_fill(~shown, torch.finfo(torch.float32).min)
    restarting = torch.stack([torch.arange(8), positions((5, 3))[0]])
    packed = model(ids, attention_mask=mask, position_ids=restarting, use_cache=False).logits
    torch.testing.assert_close(packed[1:], alone(model, ids[1:], (5, 3)), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(packed[:1, :7], model(ids[:1, :7]).logits, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(packed[0, 7], model(ids[:1]).logits[0, 7])


@pytest.mark.parametrize(
    "method", ["fire[threshold=4]", "dape1x3-fire[threshold=4]", "rope", "kerple", "sinusoidal"]
)
def test_a_mask_by_query_counts_each_documents_tokens(method):
    """Two documents and left padding, said by a mask [batch, 1, queries, keys], are as each alone."""
    model = tiny(method)
    ids = torch.randint(0, 40, (1, 15))
    document = torch.tensor([-1] * 3 + [0] * 7 + [1] * 5)
    shown = (document[:, None] == document) & (document >= 0)[:, None]
    shown &= torch.ones(15, 15, dtype=torch.bool).tril()
    together = model(ids, attention_mask=shown[None, None]).logits
    for start, stop in ((3, 10), (10, 15)):
        torch.testing.assert_close(together[:, start:stop], model(ids[:, start:stop]).logits)
