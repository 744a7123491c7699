"""Decoder layers in one call: against transformers, bitwise independent of a token's place, in sessions and drafters.

Shapes: R rows, C context tokens, D hidden, L layers, G key-value heads, H head size, T feature layers, V vocabulary.
"""

import copy
import dataclasses
import itertools
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_target
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from draftsmith.eval.trees.verify import TreeShape
from draftsmith.models.decoding.kv_cache import seen_nodes
from draftsmith.models.kernels import cpu_library
from draftsmith.models.kernels.cpu_kernels import MOST_VECTORS, PackedLinear, pack_linears
from draftsmith.models.kernels.cpu_layers import CpuTarget
from draftsmith.models.kernels.cpu_library import cpp_compiler, has_kernels, vector_lanes
from draftsmith.models.target.features import FINAL_FEATURES, FeatureTap

pytestmark = pytest.mark.skipif(not has_kernels(), reason="no C++ compiler")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# With biases, and with QK norms: the others have a part of these.
EVERY_FAMILY = pytest.mark.parametrize("family", ["llama", "qwen3"])
NUM_LAYERS, VOCAB_SIZE = 2, 333
# The embeddings, the residual stream between and after the layers, and the LM head's input.
TAPS = (0, 1, NUM_LAYERS, FINAL_FEATURES)
MOST_TREE_NODES = 64
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
ROUNDED = {"rtol": 2**-5, "atol": 2**-4}  # for bf16 logits up to 4, whose last bit is 2**-6


def random_target(
    family: str = "llama",
    heads: tuple[int, int] = (4, 2),
    head_size: int = 32,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> PreTrainedModel:
    """Build an unpacked target with random biases and norms, whose sizes do not fill whole blocks.

    Qwen 3's hidden size fills tiles (AMX), 32 inputs each; the others' does not.

    Args:
        heads: Query heads and key-value heads.
    """
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" and heads == (9, 3) else {}
    hidden_size = 96 if family == "qwen3" else 72
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": hidden_size, "intermediate_size": 100, "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": head_size,
        "max_position_embeddings": 8192, "sliding_window": None, "initializer_range": 0.1, "tie_word_embeddings": False,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(head_size + heads[0])
    config = AutoConfig.for_model(family, **{**values, **biases, **changes})
    target = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return target.to(dtype)


def packed_target(target: PreTrainedModel, positions: int = 8192) -> CpuTarget:
    """Pack the target in place."""
    pack_linears(target)
    made = CpuTarget.of(target, positions)
    assert made is not None
    return made


@dataclasses.dataclass
class Rows:
    """Inputs of one forward: R tokens, the last nodes of a tree, and the keys and values of C context tokens.

    parents: of the tree's nodes. window: how many positions a row sees. seen: [R, C + R], the columns that each row
    sees, where the rows' own columns follow the context's. keys, values: [L, 1, G, C, H].
    """

    ids: Tensor
    positions: Tensor
    parents: list[int]
    window: int | None
    seen: Tensor
    keys: Tensor
    values: Tensor

    @property
    def context(self) -> int:
        """Return how many context tokens there are."""
        return self.keys.shape[3]

    def first(self, count: int) -> "Rows":
        """Return the first rows, which see no later ones."""
        seen = self.seen[:count, : self.context + count]
        changes = {"ids": self.ids[:count], "positions": self.positions[:count], "parents": self.parents[:count]}
        return dataclasses.replace(self, **changes, seen=seen)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [R, C + R]."""
        return torch.zeros(self.seen.shape, dtype=dtype).masked_fill(~self.seen, torch.finfo(dtype).min)

    def is_chain(self) -> bool:
        """Return whether a row's parent is the row before it."""
        return self.parents == list(range(-1, len(self.parents) - 1))


def random_rows(target: PreTrainedModel, rows: int, context: int, shape: str = "chain") -> Rows:
    """Build the inputs of one forward in the target's dtype.

    Args:
        shape: `chain`; `tree`, random; `window`, a tree whose nodes see the 7 positions up to their own.
    """
    generator = torch.Generator().manual_seed(rows + context)
    parents = torch.arange(-1, rows - 1)
    if shape != "chain":
        parents = torch.tensor([-1, *(int(torch.randint(n, (), generator=generator)) for n in range(1, rows))])
    tree = TreeShape.of(tuple(parents.tolist()))
    positions = torch.tensor(tree.depths) + context
    seen = torch.cat([torch.ones(rows, context, dtype=torch.bool), seen_nodes(tree.parents, rows)], dim=1)
    window = 7 if shape == "window" else None
    if window is not None:
        seen &= torch.cat([torch.arange(context), positions]) > positions[:, None] - window
    config = target.config
    kept = (NUM_LAYERS, 1, config.num_key_value_heads, context, config.head_dim)
    keys, values = torch.randn((2, *kept), generator=generator).to(target.dtype)
    ids = torch.randint(VOCAB_SIZE, (rows,), generator=generator)
    return Rows(ids, positions, parents.tolist(), window, seen, keys, values)


@dataclasses.dataclass
class Outputs:
    """Outputs of one forward: features [R, T * D], logits [R, V], and the rows' keys and values [L, 1, G, R, H]."""

    features: Tensor
    logits: Tensor
    keys: Tensor
    values: Tensor

    def tensors(self) -> list[Tensor]:
        """Return all four."""
        return [self.features, self.logits, self.keys, self.values]

    def first(self, count: int) -> "Outputs":
        """Return the outputs of the first rows."""
        return Outputs(
            self.features[:count], self.logits[:count], self.keys[..., :count, :], self.values[..., :count, :]
        )


@torch.no_grad()
def transformers_outputs(target: PreTrainedModel, rows: Rows) -> Outputs:
    """Run transformers' own modules, in the target's dtype."""
    cache, dtype = DynamicCache(), target.dtype
    if rows.context:
        for layer, (keys, values) in enumerate(zip(rows.keys.to(dtype), rows.values.to(dtype), strict=True)):
            cache.update(keys, values, layer)
    with closing(FeatureTap(target, TAPS)) as tap:
        logits = target(
            input_ids=rows.ids[None],
            position_ids=rows.positions[None],
            attention_mask=rows.mask(dtype)[None, None],
            past_key_values=cache,
        ).logits[0]
        features = tap.take()[0]
    written = [torch.stack([getattr(layer, name) for layer in cache.layers]) for name in ("keys", "values")]
    return Outputs(features, logits, *(part[..., rows.context :, :] for part in written))


def room_for(rows: Rows) -> list[Tensor]:
    """Return a cache of keys and one of values with the context, room for the rows, and more columns."""
    caches = []
    for part in (rows.keys, rows.values):
        cache = part.new_full((*part.shape[:3], rows.context + len(rows.ids) + 5, part.shape[4]), float("nan"))
        cache[..., : rows.context, :] = part
        caches.append(cache)
    return caches


@torch.no_grad()
def our_outputs(ours: CpuTarget, rows: Rows) -> Outputs:
    """Run one call, and check that only the rows' own columns of the cache are written; a chain has no parents."""
    end, caches = rows.context + len(rows.ids), room_for(rows)
    before = [cache.clone() for cache in caches]
    parents = None if rows.is_chain() else rows.parents
    logits, features = ours.forward(
        rows.ids.tolist(), rows.positions.tolist(), *caches, rows.context, TAPS, parents, rows.window
    )
    for cache, old in zip(caches, before, strict=True):
        old[..., rows.context : end, :] = cache[..., rows.context : end, :]
        torch.testing.assert_close(cache, old, rtol=0, atol=0, equal_nan=True)
    return Outputs(features, logits, *(cache[..., rows.context : end, :] for cache in caches))


def assert_same_bits(ours: Outputs, theirs: Outputs) -> None:
    for our_part, their_part in zip(ours.tensors(), theirs.tensors(), strict=True):
        assert torch.equal(our_part, their_part)


def is_covered(head_size: int) -> bool:
    """Return whether heads of this size fill whole vectors of this processor, up to its limit."""
    return head_size % vector_lanes() == 0 and head_size <= MOST_VECTORS * vector_lanes()


# ---- against transformers ----

# Every family with two sizes and numbers of heads, and contexts from none to several pages.
SHAPES = [
    ("llama", (9, 3), 32, 0), ("llama", (8, 1), 96, 37), ("mistral", (4, 4), 128, 600), ("mistral", (9, 3), 64, 2),
    ("qwen2", (8, 1), 96, 1), ("qwen2", (4, 4), 64, 37), ("qwen3", (9, 3), 64, 4096), ("qwen3", (4, 4), 32, 600),
]  # fmt: skip
EVERY_SHAPE = pytest.mark.parametrize(("family", "heads", "head_size", "context"), SHAPES)
ROW_COUNTS = (1, 2, 13, 14, 15, 33, 64)


@EVERY_DTYPE
@EVERY_SHAPE
def test_fp32_equals_transformers_in_fp64_and_bf16_is_as_near_to_it_as_transformers(
    family: str, heads: tuple[int, int], head_size: int, context: int, dtype: torch.dtype
) -> None:
    """Compare features of every layer, logits, and written keys and values for every number of rows.

    The reference of bf16 has the same bf16 weights and context. transformers rounds to bf16 wherever the kernels do and
    in some places more, so our error, of fewer roundings, must not exceed its error except by chance. Over 13 rows and
    more, chance is 1/10 of the root mean square (measured: 0.87 to 0.90 of transformers' on average, 1.03 at most);
    over one row, whose errors come from few roundings, half of it (1.38 at most), and a factor of 2 of the largest
    error (1.68).
    """
    if not is_covered(head_size):
        pytest.skip(f"no heads of {head_size} on this processor")
    target = random_target(family, heads, head_size, dtype)
    exact, plain, ours = copy.deepcopy(target).double(), copy.deepcopy(target), packed_target(target)
    for shape in ("chain", "tree", "window"):
        rows = random_rows(target, MOST_TREE_NODES, context, shape)
        wanted = transformers_outputs(exact, rows)
        theirs = wanted if dtype == torch.float32 else transformers_outputs(plain, rows)
        for count in ROW_COUNTS:
            some = rows.first(count)
            found = our_outputs(ours, some)
            parts = (each.first(count).tensors() for each in (found, theirs, wanted))
            for our_part, their_part, exact_part in zip(*parts, strict=True):
                if dtype == torch.float32:
                    torch.testing.assert_close(our_part.double(), exact_part, **CLOSE)
                    continue
                our_error, their_error = (part.double() - exact_part for part in (our_part, their_part))
                chance = 1.1 if count >= 13 else 1.5
                assert our_error.square().mean().sqrt() <= chance * their_error.square().mean().sqrt() + 1e-6
                assert our_error.abs().max() <= 2 * their_error.abs().max() + 1e-6


@EVERY_DTYPE
@EVERY_FAMILY
@pytest.mark.parametrize("shape", ["tree", "window"])
def test_last_nodes_of_a_tree_have_the_bits_of_the_whole_tree(family: str, shape: str, dtype: torch.dtype) -> None:
    """The first nodes' keys and values are in the cache then; a chain that is given as a tree has its own bits."""
    ours = packed_target(target := random_target(family, (9, 3), 64, dtype))
    for count, context in ((13, 40), (64, 300)):
        rows = random_rows(target, count, context, shape)
        whole, earlier = our_outputs(ours, rows), count // 3
        keys, values = (torch.cat([old, new[..., :earlier, :]], dim=3) for old, new in (
            (rows.keys, whole.keys), (rows.values, whole.values),
        ))  # fmt: skip
        last = dataclasses.replace(
            rows, ids=rows.ids[earlier:], positions=rows.positions[earlier:], keys=keys, values=values
        )
        assert torch.equal(our_outputs(ours, last).logits, whole.logits[earlier:])
    chain = random_rows(target, 5, 20)
    as_tree = ours.forward(
        chain.ids.tolist(), chain.positions.tolist(), *room_for(chain), 20, TAPS, parents=chain.parents
    )
    assert torch.equal(as_tree[0], our_outputs(ours, chain).logits)


@EVERY_DTYPE
def test_bits_do_not_depend_on_the_number_of_rows(dtype: torch.dtype) -> None:
    """1 to 63 rows have the bits of all 64."""
    target = random_target("qwen3", (9, 3), 32, dtype)
    ours = packed_target(target)
    rows = random_rows(target, MOST_TREE_NODES, 50, "tree")
    whole = our_outputs(ours, rows)
    for count in range(1, MOST_TREE_NODES):
        assert_same_bits(our_outputs(ours, rows.first(count)), whole.first(count))


@pytest.mark.parametrize(("hidden_size", "heads"), [(71, (1, 1)), (33, (3, 1))])
@EVERY_DTYPE
def test_odd_sizes(dtype: torch.dtype, hidden_size: int, heads: tuple[int, int]) -> None:
    """In bf16 two inputs are read together: the last of an odd number is alone."""
    sizes = {"hidden_size": hidden_size, "intermediate_size": 101, "vocab_size": VOCAB_SIZE}
    target = random_target("llama", heads, 32, dtype, **sizes)
    exact, plain, ours = copy.deepcopy(target).double(), copy.deepcopy(target), packed_target(target)
    rows = random_rows(target, 15, 20, "tree")
    wanted, theirs = transformers_outputs(exact, rows), transformers_outputs(plain, rows)
    parts = (each.tensors() for each in (our_outputs(ours, rows), theirs, wanted))
    for our_part, their_part, exact_part in zip(*parts, strict=True):
        error = (our_part.double() - exact_part).abs().max()
        assert error <= (1e-5 if dtype == torch.float32 else 2 * (their_part.double() - exact_part).abs().max())


def test_scaled_rope_and_tied_heads() -> None:
    """RoPE scaled in its angles and, as by YaRN, in its magnitude."""
    ropes = [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 512},
        {
            "rope_type": "llama3", "factor": 8.0, "rope_theta": 500_000.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
        },
    ]  # fmt: skip
    for rope in ropes:
        target = random_target("llama", rope_parameters=rope, tie_word_embeddings=True)
        exact, ours = copy.deepcopy(target).double(), packed_target(target)
        rows = random_rows(target, 9, 700, "tree")
        found, theirs = our_outputs(ours, rows), transformers_outputs(exact, rows)
        for our_part, their_part in zip(found.tensors(), theirs.tensors(), strict=True):
            torch.testing.assert_close(our_part.double(), their_part, **CLOSE)


# ---- the same bits ----


@EVERY_DTYPE
@EVERY_FAMILY
def test_node_of_a_tree_has_the_bits_of_its_path(family: str, dtype: torch.dtype) -> None:
    """Each path of a tree, token by token without a mask, against all nodes in one call."""
    ours = packed_target(target := random_target(family, (9, 3), 32, dtype))
    tree = random_rows(target, 25, 21, "tree")
    whole = our_outputs(ours, tree)
    own = tree.seen[:, tree.context :]
    for leaf in (24, 20, 13, 0):
        path = own[leaf].nonzero()[:, 0].tolist()
        keys, values = tree.keys, tree.values
        for node in path:
            ids, positions = tree.ids[node : node + 1], tree.positions[node : node + 1]
            alone = Rows(ids, positions, [-1], None, torch.ones(1, keys.shape[3] + 1) > 0, keys, values)
            found = our_outputs(ours, alone)
            assert torch.equal(found.features[0], whole.features[node])
            assert torch.equal(found.logits[0], whole.logits[node])
            keys, values = torch.cat([keys, found.keys], dim=3), torch.cat([values, found.values], dim=3)
            assert torch.equal(keys[..., -1, :], whole.keys[..., node, :])
            assert torch.equal(values[..., -1, :], whole.values[..., node, :])


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Return a function that sets the number of threads, which is restored at the end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@EVERY_DTYPE
@EVERY_FAMILY
def test_bits_do_not_depend_on_threads(family: str, dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    """Also with more threads than blocks of a weight, and than rows."""
    ours = packed_target(target := random_target(family, (9, 3), 64, dtype))
    for rows in (1, 3, 13, 40):
        some = random_rows(target, rows, 70, "tree")
        threads(1)
        wanted = our_outputs(ours, some)
        for number in (2, 5):
            threads(number)
            assert_same_bits(our_outputs(ours, some), wanted)


# ---- weights that change ----


@torch.no_grad()
@EVERY_DTYPE
@pytest.mark.parametrize("is_new", [False, True], ids=["in place", "another tensor"])
def test_changed_weights_are_read_at_the_next_sequence(is_new: bool, dtype: torch.dtype) -> None:
    """Each of the embeddings', projections' with their biases, norms' and the LM head's."""
    target = random_target("qwen2", dtype=dtype)
    ours = packed_target(target)
    rows = random_rows(target, 5, 9, "tree")
    before = our_outputs(ours, rows)
    of_first_layer = [name for name, _ in target.named_parameters() if "layers.1" not in name]
    for name in of_first_layer:
        module, _, kind = name.rpartition(".")
        weight = target.get_parameter(name)
        if is_new:
            setattr(target.get_submodule(module), kind, nn.Parameter(weight * 1.5, requires_grad=False))
        else:
            weight.mul_(1.5)
        ours.refresh()
        after = our_outputs(ours, rows)
        assert not torch.equal(before.logits, after.logits), name
        before = after
    fresh = copy.deepcopy(target)
    for module in fresh.modules():
        if isinstance(module, PackedLinear):
            module.__class__ = nn.Linear
    assert_same_bits(before, our_outputs(packed_target(fresh), rows))


# ---- what is not covered ----


class OtherLayer(LlamaDecoderLayer):
    pass


class OtherLlama(LlamaForCausalLM):
    pass


# A name of a module, and what makes it one that is not covered.
UNCOVERED_MODULES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a derived target": ("", lambda target: setattr(target, "__class__", OtherLlama)),
    "a derived layer": ("model.layers.1", lambda layer: setattr(layer, "__class__", OtherLayer)),
    "float64": ("", nn.Module.double),
    "float16": ("", nn.Module.half),
    "a head that is trained": ("lm_head", lambda head: head.weight.requires_grad_(True)),
    "a projection that is trained": ("model.layers.1.mlp.up_proj", lambda linear: linear.weight.requires_grad_(True)),
}
UNCOVERED_PARTS = ("model.layers.1.self_attn.k_proj", "model.layers.1.input_layernorm", "model.norm", "lm_head")


@pytest.mark.parametrize("case", UNCOVERED_MODULES)
def test_targets_of_other_classes_or_dtypes_run_unchanged(case: str) -> None:
    target, (name, change) = random_target(), UNCOVERED_MODULES[case]
    change(target.get_submodule(name))
    pack_linears(target)
    assert CpuTarget.of(target, 64) is None


@pytest.mark.parametrize("name", [*UNCOVERED_PARTS, "model.embed_tokens"])
def test_targets_with_one_part_in_another_dtype_run_unchanged(name: str) -> None:
    target = random_target()
    pack_linears(target)
    target.get_submodule(name).bfloat16()
    assert CpuTarget.of(target, 64) is None


def test_other_architectures_run_unchanged() -> None:
    """Another activation, angles that depend on the length, heads that fill no vector or too many; unpacked ones."""
    lanes = vector_lanes()
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    others: list[dict[str, Any]] = [{"hidden_act": "gelu"}, {"rope_parameters": dynamic}]
    others += [{"head_size": lanes + lanes // 2}, {"head_size": (MOST_VECTORS + 1) * lanes}]
    for target in (
        *(random_target(**other) for other in others),
        tiny_target("gemma", head_dim=32),
        tiny_target("gpt2"),
    ):
        pack_linears(target)
        assert CpuTarget.of(target, 64) is None
    assert CpuTarget.of(random_target(), 64) is None


# ---- other processors ----

# Baseline x86-64 has 4 lanes, AVX2 has 8, AVX-512 16, without bf16 products, with them, and with tiles (AMX).
INSTRUCTION_SETS = ("x86-64", "x86-64-v3", "x86-64-v4", "cooperlake -D__znver4__", "native")  # Zen's: pairs of bf16
# Runs in a separate process, which loads one library: for each case the outputs of 13 rows are written to a file.
COMPUTE = """
import sys
from pathlib import Path
import torch
from draftsmith.models.kernels import cpu_library
library, tests, file = sys.argv[1:]
cpu_library._built = lambda compiler: Path(library)
sys.path[:0] = [tests, tests + "/models/kernels"]
import test_cpu_layers
torch.save(test_cpu_layers.outputs_on_this_processor(), file)
"""


def outputs_on_this_processor() -> dict[str, Any]:
    """Return the outputs of fixed models and rows, after checks that 1 to 13 rows change no bit."""
    outputs: dict[str, Any] = {"lanes": vector_lanes()}
    for family, dtype in itertools.product(FAMILIES, DTYPES.values()):
        ours = packed_target(target := random_target(family, (9, 3), 64, dtype))
        for shape, context in (("tree", 40), ("window", 9), ("chain", 0)):
            rows = random_rows(target, 13, context, shape)
            whole = our_outputs(ours, rows)
            for count in range(1, 13):
                assert_same_bits(our_outputs(ours, rows.first(count)), whole.first(count))
            outputs[f"{family} {dtype} {shape}"] = whole.tensors()
    return outputs


@pytest.mark.nightly
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
def test_every_instruction_set_gives_the_same_results(tmp_path: Path) -> None:
    """Four libraries, each built in about half a minute: fp32 within 1e-5, bf16 within roundings."""
    compiler = cpp_compiler()
    assert compiler is not None
    by_set = {}
    for name in INSTRUCTION_SETS:
        library, file = tmp_path / f"{name}.so", tmp_path / f"{name}.pt"
        cpu_library._build(compiler, library, [(*f"-march={name}".split(), "-fopenmp")])
        tests = str(Path(__file__).parents[2])
        command = [sys.executable, "-c", COMPUTE, str(library), tests, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == -signal.SIGILL:
            continue  # this processor lacks these instructions
        assert done.returncode == 0, done.stderr
        by_set[name] = torch.load(file)
    lanes = {name: outputs.pop("lanes") for name, outputs in by_set.items()}
    assert lanes.items() >= {"x86-64": 4, "native": vector_lanes()}.items()
    assert {lanes.get("x86-64-v3", 8), lanes.get("x86-64-v4", 16)} == {8, 16}
    for outputs in by_set.values():
        for case, tensors in outputs.items():
            for our_part, their_part in zip(tensors, by_set["native"][case], strict=True):
                torch.testing.assert_close(our_part, their_part, **(ROUNDED if "bfloat16" in case else CLOSE))
