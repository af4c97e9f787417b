"""Classify texts with a BERT whose attention scores are processed.

A pretrained BERT keeps its outputs at first, because the convolution starts at zero; fine-tuning trains it along.

python examples/bert_classifier.py                           # a small untrained BERT on a made-up task
python examples/bert_classifier.py google-bert/bert-base-uncased --texts reviews.csv    # label,text in each line
"""

import argparse
import csv
import random
import sys

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

import dape
from dape.retrofitting import parameter_groups

WORDS = 60


def pairs_task(count: int, generator: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, mask and label: does the word right after the marker (id 1) occur earlier as well?"""
    ids, labels = torch.zeros(count, 24, dtype=torch.long), torch.zeros(count, dtype=torch.long)
    for row in range(count):
        words = generator.sample(range(2, WORDS), generator.randint(8, 20))
        labels[row] = generator.random() < 0.5
        asked = (
            generator.choice(words)
            if labels[row]
            else generator.choice(sorted(set(range(2, WORDS)) - set(words)))
        )
        words += [1, asked]
        ids[row, : len(words)] = torch.tensor(words)
    return ids, (ids > 0).long(), labels


def read(path: str, name: str) -> tuple[Tensor, Tensor, Tensor]:
    with open(path, newline="") as file:
        labels, texts = zip(*((int(label), text) for label, text in csv.reader(file)), strict=True)
    words = AutoTokenizer.from_pretrained(name)(
        list(texts), padding=True, truncation=True, return_tensors="pt"
    )
    return words["input_ids"], words["attention_mask"], torch.tensor(labels)


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a BERT, ModernBERT, … for sequence classification")
    parser.add_argument("--texts", help="CSV of label,text; the last fifth is for evaluation")
    parser.add_argument(
        "--method", default="dape1x3", help="a processor alone keeps the model's own positions"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    if given.model:
        data = read(given.texts, given.model)
        count = int(data[2].max()) + 1
        model = AutoModelForSequenceClassification.from_pretrained(given.model, num_labels=count)
    else:
        data = pairs_task(4000, random.Random(0))
        model = BertForSequenceClassification(
            BertConfig(
                vocab_size=WORDS,
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=128,
                max_position_embeddings=64,
                hidden_dropout_prob=0.0,
            )
        )
    model.eval()
    few = {"input_ids": data[0][:4], "attention_mask": data[1][:4]}
    before = model(**few).logits
    dape.retrofit(model, given.method)
    print(f"logits change by {(model(**few).logits - before).abs().max().item():.1e} at first")
    optimizer = torch.optim.AdamW(parameter_groups(model, 1e-3 if not given.model else 3e-5, added_rate=5.0))
    cut = len(data[0]) * 4 // 5
    model.train()
    for step in range(given.steps):
        rows = torch.randint(cut, (given.batch,))
        ids, mask, labels = (x[rows] for x in data)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, given.steps // 10) == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.eval()
    with torch.no_grad():
        ids, mask, labels = (x[cut:] for x in data)
        right = (model(input_ids=ids, attention_mask=mask).logits.argmax(-1) == labels).float().mean().item()
    print(f"accuracy on {len(labels)} held-out texts: {right:.1%}")
    return right


if __name__ == "__main__":
    main(sys.argv[1:])
