"""Tiny language models in folders, as if from the Hub, with random weights and a tokenizer of whole words."""

import json

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


def causal(folder, pad=True, width=16):
    """A Llama of 6,224 weights, or a wider one."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=2 * width,
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


def packed_file(file):
    """A Llama in a GGUF file, its matrices in 8 bits, with a tokenizer of byte pairs."""
    import gguf
    from tokenizers import decoders, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<s>", "</s>"]
    inner.train_from_iterator(
        [" ".join(WORDS)] * 9,
        trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    vocab = inner.get_vocab()
    merges = [" ".join(pair) for pair in json.loads(inner.to_str())["model"]["merges"]]
    writer, width = gguf.GGUFWriter(str(file), "llama"), 32
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(2)
    writer.add_feed_forward_length(2 * width)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(width // 2)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([3 if token in special else 1 for token in sorted(vocab, key=vocab.__getitem__)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(vocab["<s>"])
    writer.add_eos_token_id(vocab["</s>"])
    square = ("attn_q", "attn_k", "attn_v", "attn_output")
    shapes = {"token_embd": (len(vocab), width), "output_norm": (width,)}
    for layer in range(2):
        own = {**dict.fromkeys(square, (width, width)), "attn_norm": (width,), "ffn_norm": (width,)}
        own |= {"ffn_gate": (2 * width, width), "ffn_up": (2 * width, width), "ffn_down": (width, 2 * width)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    generator, kind = torch.Generator().manual_seed(0), gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        values = (0.3 * torch.randn(shape, generator=generator) if len(shape) > 1 else torch.ones(shape)).numpy()
        if len(shape) > 1:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


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
