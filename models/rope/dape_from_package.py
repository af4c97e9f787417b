"""Our classes, from the installed package."""

from dape.models import DapeConfig, DapeModel, DapeForCausalLM, DapeForSequenceClassification, DapeForTokenClassification
