"""The variants that `benchmarks/drafters/ideas.py` trains: each idea alone, and nothing else."""

import itertools

from support.benchmark_scripts import benchmark

ideas = benchmark("drafters/ideas")


def test_each_idea_alone() -> None:
    recipes = {recipe.name: recipe for recipe in ideas.recipes_of("blocks", [])}
    assert len(recipes) == 4 + 2 * 2 * 2 + 1
    for way, other in (("into_inputs-3", "into_inputs-1"), ("as_keys-3", "as_keys-1")):
        assert recipes[way].drafter.options == {**recipes[other].drafter.options, "num_layers": 3}
        markov = recipes[f"{way}-markov"]
        assert markov.drafter.options == {**recipes[way].drafter.options, "markov_rank": 64}
        assert markov.train == recipes["embedded-dspark"].train
    drafted = {recipe.drafter.kind: recipe for recipe in recipes.values()}
    assert set(drafted) == {"parallel", "dflash", "dspark", "peagle"}
    assert {recipe.data.conversations.limit for recipe in recipes.values()} == {1600}
    trees = {tuple(method.tree for method in recipe.eval.methods) for recipe in recipes.values()}
    assert trees == {("chain", "best_first")}


def test_losses_and_norms() -> None:
    """A row differs from its own recipe in what its name says, and in nothing else."""
    added = {}
    for which, bases in (("losses", ["quickstart", "embedded-dspark"]), ("norms", ["embedded-eagle3"])):
        recipes = {recipe.name: recipe for recipe in ideas.recipes_of(which, [])}
        for base, (name, recipe) in itertools.product(bases, recipes.items()):
            if name.startswith(base):
                assert recipe.train == recipes[base].train
                own, others = recipe.drafter.options, recipes[base].drafter.options
                added[name] = {key: own[key] for key in own if key not in others or own[key] != others[key]}
    dpace, fc_norm, norm_output = {"dpace_alpha": 0.5}, {"fc_norm": True}, {"norm_output": True}
    assert added == {
        "quickstart": {},
        "quickstart-kl": {"loss": "kl"},
        "quickstart-lk_alpha": {"loss": "lk_alpha"},
        "quickstart-lk_lambda": {"loss": "lk_lambda"},
        "quickstart-dpace": dpace,
        "embedded-dspark": {},
        "embedded-dspark-dpace": dpace,
        "embedded-eagle3": {},
        "embedded-eagle3-fc_norm": fc_norm,
        "embedded-eagle3-norm_output": norm_output,
        "embedded-eagle3-3.1": fc_norm | norm_output,
    }
