"""The variants that `benchmarks/drafters/ideas.py` trains: each idea alone, and nothing else."""

from support.benchmark_scripts import benchmark

ideas = benchmark("drafters/ideas")


def test_each_idea_alone() -> None:
    recipes = {recipe.name: recipe for recipe in ideas.recipes_of([])}
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
