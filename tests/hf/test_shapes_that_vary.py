"""One exported or compiled model for every length; masks and caches of any shape give the same numbers."""

import pytest
import torch
import transformers
from builders import decoder
from torch._dynamo.testing import CompileCounter


def tiny(method="dape1x3-kerple", **changes):
    return decoder(method, pad_token_id=0, **changes)


@pytest.mark.parametrize("method", ["dape1x3-kerple", "dape1x3-rope", "dape1x3-fire", "kerple", "rope"])
def test_an_exported_model_reads_every_length(method):
    model, ids = tiny(method), torch.randint(40, (2, 600))
    length = torch.export.Dim("length", min=2, max=4096)
    with torch.no_grad():
        example = {"input_ids": ids[:, :12].clone(), "use_cache": False}
        shapes = {"input_ids": {1: length}, "use_cache": None}
        exported = torch.export.export(model, (), example, dynamic_shapes=shapes, strict=False).module()
        for tokens in (2, 5, 40, 600):
            told = exported(input_ids=ids[:, :tokens], use_cache=False).logits
            own = model(ids[:, :tokens], use_cache=False).logits
            torch.testing.assert_close(told, own, rtol=1e-4, atol=1e-5)


# Padding before, between and after the tokens of a prompt; the last token is real, as generate() wants it.
MASKS = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [1, 0, 0, 1, 1, 1], [1, 1, 0, 1, 0, 1]])


@pytest.mark.parametrize("method", ["dape1x3-kerple", "dape1x3-rope", "fox"])
def test_any_cache_generates_the_same_from_prompts_with_holes(method):
    model, ids = tiny(method), torch.randint(1, 40, MASKS.shape)
    asked = {"attention_mask": MASKS, "max_new_tokens": 5, "do_sample": False}
    asked |= {"output_logits": True, "return_dict_in_generate": True}
    ways = [{}, {"use_cache": False}, {"cache_implementation": "static"}]
    first, *others = (torch.stack(model.generate(ids, **asked, **way).logits) for way in ways)
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-4, atol=1e-5)


def test_a_row_is_the_same_alone_and_in_a_batch_its_padding_included():
    model, ids = tiny(), torch.randint(1, 40, (3, 6))
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 0, 0]])
    together = model(ids, attention_mask=mask).logits
    for row in range(3):
        alone = model(ids[row : row + 1], attention_mask=mask[row : row + 1]).logits
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-5)


def test_positions_that_go_back_after_padding_are_no_packing():
    """generate() counts on from the padding that ends a prompt: 0, 1, 2, (1), 2 … would be two documents."""
    model, ids = tiny(), torch.randint(1, 40, (1, 5))
    mask = torch.tensor([[1, 1, 1, 0, 1]])
    with pytest.raises(ValueError, match="decrease after padding, but not to 0"):
        model(ids, attention_mask=mask, position_ids=torch.tensor([[0, 1, 2, 1, 2]]), use_cache=False)
    model(ids, attention_mask=mask, position_ids=torch.tensor([[0, 1, 2, 1, 3]]), use_cache=False)
    model(ids, attention_mask=mask, position_ids=torch.tensor([[0, 1, 2, 1, 0]]), use_cache=False)


def test_a_compiled_model_refuses_holes_that_it_would_look_through():
    model, ids = tiny(), torch.randint(1, 40, (2, 6))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        left = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
        told = compiled(ids, attention_mask=left, use_cache=False).logits
        own = model(ids, attention_mask=left, use_cache=False).logits
        torch.testing.assert_close(told[left.bool()], own[left.bool()], rtol=1e-4, atol=1e-5)
        with pytest.raises(RuntimeError, match="padding between tokens"):
            compiled(ids, attention_mask=torch.tensor([[1] * 6, [1, 0, 1, 1, 1, 1]]), use_cache=False)


def test_weights_are_shown_while_generating():
    """Of a static cache with a column for each of its places."""
    model, ids = tiny(), torch.randint(1, 40, (2, 6))
    asked = {"max_new_tokens": 4, "do_sample": False}
    asked |= {"output_attentions": True, "return_dict_in_generate": True}
    static, dynamic = (model.generate(ids, cache_implementation=kind, **asked) for kind in ("static", None))
    shapes = [step[0].shape for step in dynamic.attentions]
    assert shapes == [(2, 4, 6, 6), *((2, 4, 1, keys) for keys in (7, 8, 9))]
    whole = model(dynamic.sequences[:, :9], output_attentions=True).attentions
    for layer in range(2):
        torch.testing.assert_close(dynamic.attentions[3][layer][:, :, 0], whole[layer][:, :, 8])
    for found, own in zip(static.attentions, dynamic.attentions, strict=True):
        room = found[0].shape[-1]
        assert room >= 9
        torch.testing.assert_close(found[0], torch.nn.functional.pad(own[0], (0, room - own[0].shape[-1])))


@pytest.mark.parametrize("method", ["mta-fox", "dape3x3-kerple", "dape1x3-kerple"])
def test_one_compiled_step_decodes_padded_rows_with_a_preallocated_cache(method):
    """From the first token on, where there are fewer queries before it than the program reads."""
    model, ids = tiny(method, num_hidden_layers=1).double(), torch.randint(1, 40, (2, 9))
    mask = torch.tensor([[1] * 9, [0, 0] + [1] * 7])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    told = model(ids, attention_mask=mask, use_cache=False).logits
    torch._dynamo.reset()
    counter = CompileCounter()
    step = torch.compile(model, backend=counter, dynamic=False, fullgraph=True)
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        first = {"attention_mask": mask[:, :1], "position_ids": positions[:, :1]}
        found = [model(ids[:, :1], past_key_values=cache, use_cache=True, **first).logits]
        for index in range(1, 9):
            seen = torch.nn.functional.pad(mask[:, : index + 1], (0, 15 - index))
            given = {"attention_mask": seen, "position_ids": positions[:, index : index + 1]}
            found.append(
                step(ids[:, index : index + 1], past_key_values=cache, use_cache=True, **given).logits
            )
    assert counter.frame_count == 1
    real = mask.bool()
    torch.testing.assert_close(torch.cat(found, 1)[real], told[real], rtol=1e-9, atol=1e-9)


def test_a_mask_by_query_is_refused_where_cached_queries_are_read_again():
    model, ids = tiny("mta-kerple"), torch.randint(1, 40, (1, 6))
    cache = model(ids[:, :5], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="does not say which keys the cached queries saw, which mta-kerple"):
        model(ids[:, 5:], attention_mask=torch.ones(1, 1, 1, 6, dtype=torch.bool), past_key_values=cache)
