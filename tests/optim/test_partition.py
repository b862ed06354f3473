"""Which second moments Adam-mini shares: from models, from names, from patterns; it never fails on a shape."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import daypack
from daypack.lab.models import build_model
from daypack.optim.partition import form_of


def rules(optimizer):
    return {entry.name: entry.rule for entry in optimizer.partition_report().entries}


def steps(optimizer):
    """A step on random gradients, which every rule must survive."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def shaped(**shapes):
    return [(name.replace("__", "."), Parameter(torch.zeros(shape))) for name, shape in shapes.items()]


class Conv1D(nn.Module):
    """As transformers has it."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.weight, self.bias = nf, Parameter(torch.zeros(nx, nf)), Parameter(torch.zeros(nf))


def test_the_demo_model():
    model = build_model("tiny", seed=0)  # hidden 64, 4 heads, 2 key-value heads
    optimizer = steps(daypack.AdamMini(model))
    found = rules(optimizer)
    assert found["blocks.0.attention.q_proj.weight"] == found["blocks.1.attention.k_proj.weight"] == "head:16"
    for name in ("attention.v_proj", "attention.o_proj", "mlp.down_proj"):
        assert found[f"blocks.1.{name}.weight"] == "row"
    assert found["embedding.weight"] == found["head.weight"] == "row"
    assert found["norm.weight"] == "dense"
    assert len(optimizer.defaults["partition"]) <= 12
    state = optimizer.state[model.blocks[0].attention.k_proj.weight]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq_row"}
    assert state["exp_avg_sq_row"].shape == (32,)


def test_groups_of_a_model_know_the_model():
    model = build_model("tiny", seed=0)
    named = rules(daypack.AdamMini(daypack.param_groups(model)))
    assert named == {name: rules(daypack.AdamMini(model))[name] for name in named}
    created = daypack.create("adam_mini", daypack.param_groups(model, weight_decay=0.1))
    assert sorted(group["weight_decay"] for group in created.param_groups) == [0.0, 0.1, 0.1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "neox", "bert", "t5", "mixtral", "mamba", "falcon", "phi3", "vit"])
def test_models_of_transformers(kind):
    """Everything is covered, query and key by heads, fused ones too; and a state dict rebuilds it without the model."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model, expected = known_models(transformers)[kind]()
    optimizer = steps(daypack.AdamMini(model))
    found = rules(optimizer)
    for part, rule in expected.items():
        matches = {r for name, r in found.items() if name.endswith(part)}
        assert matches == {rule}, part
    assert len(optimizer.defaults["partition"]) <= 45
    rebuilt = type(optimizer)(optimizer.param_groups, **optimizer.defaults)
    assert rules(rebuilt) == found
    assert rebuilt.defaults == optimizer.defaults


def known_models(t):
    tiny = {"vocab_size": 60, "num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 64}
    four = {**tiny, "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

    def gpt2():
        config = t.GPT2Config(
            vocab_size=60, n_embd=48, n_layer=2, n_head=4, n_positions=16, bos_token_id=1, eos_token_id=2
        )
        fused = {"attn.c_attn.weight": "column:48x12,48x12,48x1", "mlp.c_fc.weight": "column", "wte.weight": "row"}
        return t.GPT2LMHeadModel(config), fused

    def t5():
        config = t.T5Config(vocab_size=60, d_model=48, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        return t.T5ForConditionalGeneration(config), {
            "SelfAttention.q.weight": "head:8",
            "EncDecAttention.k.weight": "head:8",
        }

    def mamba():
        config = t.MambaConfig(vocab_size=60, hidden_size=48, state_size=4, num_hidden_layers=2)
        return t.MambaForCausalLM(config), {"conv1d.weight": "row", "in_proj.weight": "row", "mixer.D": "dense"}

    def of(model, config, options, expected):
        return lambda: (getattr(t, model)(getattr(t, config)(**options)), expected)

    shared = {**four, "num_key_value_heads": 2}
    heads = {"q_proj.weight": "head:12", "k_proj.weight": "head:12", "v_proj.weight": "row"}
    wide = {"q_proj.weight": "head:16", "k_proj.weight": "head:16", "v_proj.weight": "row", "lm_head.weight": "row"}
    bert = {"self.query.weight": "head:12", "self.key.weight": "head:12", "self.value.weight": "row"}
    vit = {"image_size": 16, "patch_size": 8, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {
        "llama": of("LlamaForCausalLM", "LlamaConfig", {**shared, "head_dim": 16}, wide),
        "gpt2": gpt2,
        "neox": of("GPTNeoXForCausalLM", "GPTNeoXConfig", four, {"query_key_value.weight": "row:12x12,12x12,12x1"}),
        "bert": of("BertForMaskedLM", "BertConfig", four, bert),
        "t5": t5,
        "mixtral": of(
            "MixtralForCausalLM", "MixtralConfig", {**four, "num_key_value_heads": 2, "num_local_experts": 2}, heads
        ),
        "mamba": mamba,
        "falcon": of("FalconForCausalLM", "FalconConfig", four, {"query_key_value.weight": "row:48x12,12x12,12x1"}),
        "phi3": of(
            "Phi3ForCausalLM",
            "Phi3Config",
            {**four, "num_key_value_heads": 2},
            {"qkv_proj.weight": "row:48x12,24x12,24x1"},
        ),
        "vit": of("ViTForImageClassification", "ViTConfig", vit, {"classifier.weight": "row"}),
    }


def test_modules_of_torch():
    model = nn.ModuleDict(
        {
            "encoder": nn.TransformerEncoderLayer(32, 4, 64),
            "cross": nn.MultiheadAttention(32, 4, kdim=24, vdim=20),
            "conv": nn.Conv2d(3, 8, 5),
            "depthwise": nn.Conv1d(64, 64, 4, groups=64),
            "up": nn.ConvTranspose2d(4, 6, 3),
            "bilinear": nn.Bilinear(5, 6, 7),
            "recurrent": nn.LSTM(8, 16),
            "norm": nn.BatchNorm2d(8),
            "monkey": nn.Linear(8, 8),
        }
    )
    found = rules(steps(daypack.AdamMini(model)))
    assert found["encoder.self_attn.in_proj_weight"] == "row:32x8,32x8,32x1"
    assert (found["cross.q_proj_weight"], found["cross.k_proj_weight"]) == ("head:8", "head:8")
    assert found["cross.v_proj_weight"] == "row"
    assert {found[f"{name}.weight"] for name in ("conv", "depthwise", "up", "bilinear", "monkey")} == {"row"}
    assert found["norm.weight"] == "dense"


def test_a_tied_head_is_one_parameter_and_prefixes_of_wrappers_are_seen_through():
    model = build_model("tiny", seed=0)
    model.head.weight = model.embedding.weight
    plain = rules(daypack.AdamMini(model))
    assert "head.weight" not in plain
    compiled = torch.compile(model, backend="eager")
    assert {name.removeprefix("_orig_mod."): rule for name, rule in rules(daypack.AdamMini(compiled)).items()} == plain
    wrapped = [("module." + name, p) for name, p in model.named_parameters()]
    assert list(rules(daypack.AdamMini(wrapped, head_dim=16)).values()) == list(plain.values())


def test_layers_that_differ_get_entries_of_their_own():
    """The same name under two numbers with two rules: the pattern cannot say both."""

    def layer(heads):
        attention = nn.ModuleDict({"q_proj": nn.Linear(48, 48, bias=False)})
        attention.num_heads = heads
        return attention

    model = nn.Sequential(layer(4), layer(4), layer(6), nn.Linear(48, 48))
    optimizer = daypack.AdamMini(model)
    assert [rules(optimizer)[f"{i}.q_proj.weight"] for i in range(3)] == ["head:12", "head:12", "head:8"]
    assert rules(optimizer)["3.weight"] == "row"
    assert ("2.q_proj.weight", "head:8", "query: one for each head of 8") in optimizer.defaults["partition"]


def test_names_and_shapes_alone():
    params = shaped(
        layers__0__q_proj__weight=(64, 64),
        layers__0__k_proj__weight=(32, 64),
        layers__0__attn__c_attn__weight=(192, 64),
        layers__0__attn__query_key_value__weight=(128, 64),
        monkey__weight=(64, 64),
        value_embeds__weight=(64, 64),
        layers__0__q_proj__lora_A__default__weight=(8, 64),
        experts=(4, 24, 64),
    )
    expected = {
        "layers.0.q_proj.weight": "head:16",
        "layers.0.k_proj.weight": "head:16",
        "layers.0.attn.c_attn.weight": "row:64x16,64x16,64x1",
        "layers.0.attn.query_key_value.weight": "row:32x16,16x16,16x1",
        "monkey.weight": "row",
        "value_embeds.weight": "row",
        "layers.0.q_proj.lora_A.default.weight": "row",
        "experts": "row",
    }
    for options in ({"num_heads": 4}, {"head_dim": 16}):
        assert rules(steps(daypack.AdamMini(params, **options))) == expected, options
    with pytest.warns(UserWarning, match=r"layers\.0\.q_proj.*num_heads"):
        assert set(rules(daypack.AdamMini(params)).values()) == {"row"}
    for option in ("head_dim", "num_heads"):  # 7 divides nothing here
        with pytest.warns(UserWarning, match=rf"finds no heads for {option}=7 in layers\.0\.q_proj\.weight \(64, 64\)"):
            steps(daypack.AdamMini(params, **{option: 7}))


def test_unnamed_parameters_of_any_shape():
    shapes = [(), (1,), (9,), (1, 1), (7, 5), (5, 3, 2), (2, 3, 4, 5), (0, 4), (4, 0), (1, 300), (300, 1)]
    optimizer = steps(daypack.AdamMini([Parameter(torch.zeros(shape)) for shape in shapes]))
    assert list(rules(optimizer).values()) == ["dense"] * 3 + ["row"] * 4 + ["dense"] * 2 + ["row"] * 2


@pytest.mark.filterwarnings("ignore:AdamMini does not know the heads")
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "qkv", "query_key_value", "c_attn", "anything"])
@pytest.mark.parametrize(
    "options", [{}, {"num_heads": 4}, {"head_dim": 8}, {"num_heads": 4, "head_dim": 8}, {"value": "tensor"}]
)
def test_every_name_and_shape_gets_a_rule_that_fits(name, options):
    shapes = [
        (1, 1),
        (1, 64),
        (64, 1),
        (8, 8),
        (24, 8),
        (96, 32),
        (97, 31),
        (7, 3),
        (48, 32),
        (0, 8),
        (8, 0),
        (3, 8, 8),
        (8,),
    ]
    params = [(f"layers.{i}.{name}.weight", Parameter(torch.ones(shape))) for i, shape in enumerate(shapes)]
    optimizer = steps(daypack.AdamMini(params, **options))
    for entry in optimizer.partition_report().entries:
        assert entry.blocks <= torch.Size(entry.shape).numel()
    assert all((p != 1).all() for _, p in params)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_every_module_and_shape_gets_a_rule_that_fits():
    model = nn.ModuleDict({"q_proj": nn.Linear(8, 0), "value": nn.Linear(0, 8), "c_attn": Conv1D(24, 8)})
    model.num_heads, model.head_dim = 2, 4
    assert rules(steps(daypack.AdamMini(model, value="tensor")))["c_attn.weight"] == "column:8x4,8x4,8x8"


def test_one_second_moment_for_the_whole_value_matrix():
    model = build_model("tiny", seed=0)
    found = rules(steps(daypack.AdamMini(model, value="tensor")))
    assert found["blocks.0.attention.v_proj.weight"] == "row:32"
    fused = shaped(attn__qkv__weight=(96, 32))
    assert rules(daypack.AdamMini(fused, num_heads=4, value="tensor")) == {"attn.qkv.weight": "row:32x8,32x8,32x32"}


def test_patterns_come_first_and_the_first_that_matches_decides():
    model = build_model("tiny", seed=0)
    mine = [("*.q_proj.weight", "dense"), ["blocks.1.*", "tensor"], ("*.v_proj.weight", "row:8x4,8x1")]
    optimizer = steps(daypack.AdamMini(model, partition=mine))
    found = rules(optimizer)
    assert found["blocks.1.attention.q_proj.weight"] == "dense"
    assert found["blocks.1.mlp.up_proj.weight"] == found["blocks.1.mlp_norm.weight"] == "tensor"
    assert found["blocks.0.attention.v_proj.weight"] == "row:8x4,8x1"
    assert found["blocks.0.attention.k_proj.weight"] == "head:16"
    blocks = {entry.name: entry.blocks for entry in optimizer.partition_report().entries}
    assert blocks["blocks.0.attention.v_proj.weight"] == 2 * (2 + 8)
    assert blocks["blocks.1.mlp.up_proj.weight"] == 1
    text = str(optimizer.partition_report())
    assert "blocks.1.attention.q_proj.weight  64x64" in text
    assert "partition option, '*.q_proj.weight'" in text


def test_groups_have_partitions_of_their_own():
    q, k = (Parameter(torch.zeros(8, 6)) for _ in range(2))
    optimizer = daypack.AdamMini(
        [{"params": [("q", q)], "partition": [("q", "row:4")]}, {"params": [("k", k)]}], partition=[("*", "column")]
    )
    assert rules(optimizer) == {"q": "row:4", "k": "column"}
    optimizer.add_param_group({"params": [("new.q_proj.weight", Parameter(torch.zeros(8, 6)))]})
    assert rules(optimizer)["new.q_proj.weight"] == "column"
    with pytest.raises(ValueError, match=r"wrong\.weight"):
        optimizer.add_param_group({"params": shaped(wrong__weight=(8, 6)), "partition": [("*", "row:5x5")]})
    assert len(optimizer.param_groups) == 3


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ([("*", "heads")], "'heads'"),
        ([("*", "row:0")], "'row:0'"),
        ([("*", "row:4x")], "'row:4x'"),
        ([("*", "column:3,4")], "'column:3,4'"),
        ([("*", 4)], "got"),
        ([("*",)], "must be"),
        ("row", "must be a list"),
        ([("*", "row:5x5")], "covers 5 lines, parameter layer.weight of shape (8, 6) has 8"),
    ],
)
def test_bad_partitions_are_refused_with_the_value(partition, message):
    with pytest.raises(ValueError) as error:
        daypack.AdamMini(shaped(layer__weight=(8, 6)), partition=partition)
    assert message in str(error.value)


@pytest.mark.parametrize("option", ["num_heads", "head_dim"])
def test_bad_heads_are_refused(option):
    for wrong in (0, -1, 2.0, "4"):
        with pytest.raises(ValueError, match=option):
            daypack.AdamMini(shaped(w=(8, 6)), **{option: wrong})


def test_configurations_are_asked_from_the_inside_out():
    model = nn.Module()
    model.config = SimpleNamespace(n_head=8, head_dim=None)
    model.attn = nn.Module()
    model.attn.to_q = nn.Linear(64, 64)
    model.attn.wk = nn.Linear(64, 64)
    assert set(rules(daypack.AdamMini(model)).values()) == {"head:8", "dense"}
    model.attn.heads = 2
    assert set(rules(daypack.AdamMini(model)).values()) == {"head:32", "dense"}
    assert set(rules(daypack.AdamMini(model, num_heads=16)).values()) == {"head:4", "dense"}


@pytest.mark.filterwarnings("ignore:parameter group 0. head_dim")
def test_state_travels_with_its_partition():
    """Named differently wrapped, without the model: options of the file win, state and next step are the same."""
    model = build_model("tiny", seed=0)
    params = list(model.named_parameters())
    first = steps(daypack.AdamMini(model))
    saved = first.state_dict()
    twins = [(f"module.{name}", Parameter(p.detach().clone())) for name, p in params]
    other = daypack.AdamMini(twins, head_dim=4)
    with pytest.warns(UserWarning, match="partition") as said:
        other.load_state_dict(saved)
    assert len(said) == 2  # and head_dim
    steps(first)
    steps(other)
    for (_, p), (_, q) in zip(params, twins, strict=True):
        assert torch.equal(p, q)


def test_rules_are_read_as_documented():
    assert form_of("head:64", (256, 8), "") == form_of("row:64", (256, 8), "")
    assert form_of("row:4x2,4x1", (16, 8), "").segments == ((4, 2), (4, 1)) * 2
    assert form_of("column", (3, 5), "").axis == "col"
    assert form_of("tensor", (7, 5), "").segments == ((7, 7),)
    assert form_of("dense", (7, 5), "") is form_of("row", (0, 5), "") is None


def test_a_pattern_that_matches_nothing_is_refused_with_names_like_it():
    params = shaped(blocks__router__weight=(8, 6), head__weight=(8, 6))
    with pytest.raises(
        ValueError, match=r"'\*\.ruoter\.weight' matches no parameter; names like it are blocks\.router\."
    ):
        daypack.AdamMini(params, partition=[("head.*", "tensor"), ("*.ruoter.weight", "dense")])
    with pytest.raises(ValueError, match="matches no parameter"):
        daypack.AdamMini([{"params": params, "partition": [("heads.*", "tensor")]}])
    with pytest.raises(ValueError, match="matches no parameter"):
        daypack.AdamMini([p for _, p in params], partition=[("head.*", "tensor")])
    # A pattern may be for one group of several; wrappers' prefixes do not count; a rebuilt optimizer is accepted.
    groups = [{"params": params[:1]}, {"params": [(f"module.{name}", p) for name, p in params[1:]]}]
    optimizer = daypack.AdamMini(groups, partition=[("head.*", "tensor")])
    again = type(optimizer)(optimizer.param_groups, **optimizer.defaults)
    assert rules(again) == rules(optimizer)
