"""Tiny language models in folders, as if from the Hub, with random weights and a tokenizer of whole words."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from forwardtune._compat.transformers import transformers

TEXT = """
a an the it was is film plot good great fine fun warm bad terrible dull cold sad no yes No Yes It Answer : . ? this
that not very and of in story actor music scene lamp stone river cloud wheel label text question same
"""
WORDS = TEXT.split()
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")


def tokenizer(pad=True, encoder=False):
    vocab = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if encoder:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, **names | ({"pad_token": "<pad>"} if pad else {}), model_max_length=64
    )


def causal(folder, pad=True):
    """A Llama of 6,224 weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer(pad).save_pretrained(folder)
    return folder


def encoder(folder, masked=False):
    """A BERT, with or without a head for masked words."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    kind = transformers.BertForMaskedLM if masked else transformers.BertModel
    kind(config).save_pretrained(folder)
    tokenizer(encoder=True).save_pretrained(folder)
    return folder


GOOD, BAD, OTHER = ("good", "great", "fine", "fun", "warm"), ("bad", "terrible", "dull", "cold", "sad"), WORDS[24:]


def reviews(n=80, seed=0):
    """Texts and labels: a good or a bad word after others."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(n):
        label = ("neg", "pos")[i % 2]
        words = [_draw(OTHER, generator) for _ in range(1 + i % 9)]
        words.append(_draw(GOOD if label == "pos" else BAD, generator))
        rows.append({"text": " ".join(words), "label": label})
    return rows


def _draw(words, generator):
    return words[int(torch.randint(len(words), (1,), generator=generator))]
