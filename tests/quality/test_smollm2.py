import itertools

import pytest
import torch
from gguf import GGUFWriter
from kvd_demo import smollm2
from kvd_demo.fetch import made_once
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["H e", "l l", "He ll", "Hell o", "Ġ Ġ"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
HALF = 8  # of a head's dimension


def vocabulary():
    return SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet()) + [m.replace(" ", "") for m in MERGES]


@pytest.fixture(scope="module")
def original():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def halves_to_interleaved(weight):
    """The conversion the other way round: rotation pairs (i, i + D/2) become neighbours."""
    rows = weight.shape[0] // (2 * HALF)
    order = [2 * HALF * head + half for head in range(rows) for i in range(HALF) for half in (i, i + HALF)]
    return weight[order]


def gguf_name(name):
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in outer:
        return outer[name]
    theirs = {ours: theirs for theirs, ours in smollm2.LAYER_NAMES.items()}
    _, _, layer, *part, kind = name.split(".")
    return f"blk.{layer}.{theirs['.'.join(part)]}.{kind}"


def write_weights(writer, model):
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied to the embedding, and so not in the file
        rotated = name.endswith(("q_proj.weight", "k_proj.weight"))
        writer.add_tensor(gguf_name(name), (halves_to_interleaved(weight) if rotated else weight).numpy())


@pytest.fixture(scope="module")
def converted(tmp_path_factory, original):
    """The cache of a machine where a tiny model of the same family was converted."""
    cache = tmp_path_factory.mktemp("cache")
    writer = GGUFWriter(cache / "tiny.gguf", "llama")
    config = original.config
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(2 * HALF)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5000.0)
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(vocabulary()) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    write_weights(writer, original)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVD_CACHE", str(cache))
        made_once(smollm2.FOLDER, lambda folder: smollm2.convert(cache / "tiny.gguf", folder))
        yield cache


def test_the_converted_model_computes_what_the_original_does(converted, original):
    ids = torch.arange(40)[None] % original.config.vocab_size
    with torch.inference_mode():
        logits = smollm2.load_model(torch.float32)(ids).logits
        torch.testing.assert_close(logits, original(ids).logits, rtol=1e-5, atol=1e-5)


def test_a_model_loads_in_the_asked_dtype_ready_to_evaluate_and_with_its_special_tokens(converted):
    model = smollm2.load_model(torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (1, 2, 2)


def test_the_tokenizer_adds_no_token_of_its_own(converted):
    tokenizer = smollm2.load_tokenizer()
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("Hello")) == ["Hello"]


def test_each_digit_is_a_token_and_the_spaces_before_it_join(converted):
    tokenizer = smollm2.load_tokenizer()
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("  407")) == ["ĠĠ", "4", "0", "7"]


def test_any_text_comes_back_from_its_tokens(converted):
    tokenizer = smollm2.load_tokenizer()
    text = "It's 12345 km\n\n  away — naïve café 日本. <|im_start|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_gives_special_tokens(converted):
    tokenizer = smollm2.load_tokenizer()
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == ["<|im_start|>", "Hello", "<|im_end|>"]


def test_loading_says_nothing(converted, capfd):
    smollm2.load_model(torch.float32)
    smollm2.load_tokenizer()
    assert "".join(itertools.chain(*capfd.readouterr())) == ""
