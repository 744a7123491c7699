"""`draftsmith push`: publish the run's drafter, with recipe, figures and model card, or its answers on the Hub.

1. All files are collected in `runs/<name>/hub/`, without local paths or secrets.
2. They are uploaded as one commit, so that nobody can download half a drafter. Unchanged files are not sent again.

`--data` publishes the distilled conversations instead, from `runs/<name>/hub_data/`.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import HfApi, ModelCard, constants, get_token, hf_hub_download
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file, save_file

from draftsmith.cli.artifacts import card_figures, recorded_proof, update_card
from draftsmith.cli.console import console
from draftsmith.data.card.card import write_distilled_set
from draftsmith.data.sources.distilled import CARD_JSON
from draftsmith.data.sources.files import STDLIB, is_hub_name
from draftsmith.errors import UserError, masked
from draftsmith.files import bytes_text, read_json, write_atomically, write_json
from draftsmith.hub import hub_errors, hub_id
from draftsmith.models.base.registry import check_as_trained, load_drafter_class, no_drafter, read_training
from draftsmith.models.target.loading import EMBEDDED_TARGET
from draftsmith.models.weights import weights_sha256
from draftsmith.recipes.run_folder import TRAINING_FILE, RunFolder, with_run_lock
from draftsmith.recipes.schema import Recipe
from draftsmith.results import portable
from draftsmith.train.drafter.model_card import CARD_FILE, Publication, public_recipe

YOU = "YOU"  # stands for the user name if the Hub is not queried for it
LONGEST_NAME = 96  # of a repository
TEXTS = {".json", ".jsonl", ".md", ".yaml", ".yml", ".txt", ".jinja"}
# Files of an earlier push that are deleted if this one lacks them: a left-over shard would corrupt the weights.
OURS = re.compile(r"[^/]+\.(?:json|safetensors|yaml)|(?:eval|export|shards)/.*")
LICENSE_KEYS = ("license", "license_name", "license_link")
STDLIB_LICENCE, UNKNOWN_LICENCE = "psfl", "unknown"  # as the Hub spells them


@with_run_lock("push")
def push(
    recipe: Recipe,
    repo: str | None = None,
    revision: str | None = None,
    public: bool = False,
    base_model: str | None = None,
    license_id: str | None = None,
    dtype: torch.dtype | None = None,
    data: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Publish the run's drafter on the Hub, or its distilled conversations; `draftsmith push --help` has the options.

    Returns:
        `repo`, `address` (the commit's URL, None if nothing was sent) and `files_bytes` (sizes by name).

    Raises:
        UserError: There is no trained drafter or nothing was distilled, a file names a local path or a secret, or the
            Hub refuses.
    """
    if not data:
        _check_trained(recipe)
    api, folder = HfApi(), RunFolder(recipe).root / ("hub_data" if data else "hub")
    repo = _full_name(api, repo or default_name(recipe, base_model, data), base_model, dry_run)
    if data:
        at = "" if revision is None else f" data.conversations.revision={revision}"
        use = f"data.distill.engine=none data.conversations.source={repo}{at}"
        licences = {
            source.label: license_id or _get_prompts_licence(source.source, source.revision, dry_run)
            for source in recipe.data.conversations.sources
        }
        write_distilled_set(recipe, folder, licences, base_model)
    else:
        at = "" if revision is None else f"@{revision}"
        use = f"{{name: tree, tree: best_first, drafter: {repo}{at}}} in eval.methods"
        licence = {"license": license_id} if license_id else get_license(base_model or recipe.target.model, dry_run)
        if not licence:
            console.print(
                "The target's card names no licence, so the drafter's has none: --license sets one", markup=False
            )
        _stage(recipe, Publication(folder, repo, base_model, licence), dtype)
    sizes = {name: file.stat().st_size for name, file in _checked_files(recipe, folder).items()}
    console.print(f"{repo}: {len(sizes)} files, {bytes_text(sum(sizes.values()))}", markup=False)
    for name, size in sizes.items():
        console.print(f"  {bytes_text(size):>10}  {name}", markup=False)
    address = None
    if dry_run:
        console.print(f"Nothing was sent; the files are in {folder}", markup=False)
    else:
        with hub_errors("nothing was pushed", repo):
            address = _send(api, repo, "dataset" if data else "model", folder, list(sizes), revision, public)
        console.print(f"\nPushed    {address}", markup=False)
        console.print(f"Use it    {use}", markup=False, soft_wrap=True)
    return {"repo": repo, "address": address, "files_bytes": sizes}


def _check_trained(recipe: Recipe) -> None:
    """Raise UserError unless the run has a drafter that was trained with this recipe."""
    folder = RunFolder(recipe).drafter
    if not (folder / TRAINING_FILE).is_file():
        raise no_drafter(folder)
    trained = {"drafter.kind": check_as_trained(folder), **read_training(folder).settings}
    for key, value in (("drafter.kind", recipe.drafter.kind), ("target.model", recipe.target.model)):
        if trained.get(key, value) != value:
            raise UserError(
                f"key `{key}`: {folder} was trained with {trained[key]}, not {value}: use the recipe that it was "
                "trained with"
            )


def _full_name(api: HfApi, repo: str, base_model: str | None, dry_run: bool) -> str:
    """Return the repository's name with its owner.

    Raises:
        UserError: The name or that of the target is not valid, or the Hub does not know the user.
    """
    if base_model is not None and hub_id(base_model) is None:
        raise UserError(f"option --base-model: {base_model} is no Hub id: give owner/name")
    user = YOU
    if not dry_run:
        with hub_errors("nothing was pushed", repo):
            user = api.whoami()["name"]
    repo = repo if "/" in repo else f"{user}/{repo}"
    if hub_id(repo) is None or len(repo.rpartition("/")[2]) > LONGEST_NAME:
        raise UserError(
            f"option --repo: {repo} is no valid repository name: give name or user/name, of at most {LONGEST_NAME} "
            "characters"
        )
    return repo


def default_name(recipe: Recipe, base_model: str | None = None, data: bool = False) -> str:
    """Return the default name of the Hub repository, `{target}-{method}`, or `{target}-distilled` with `data`."""
    target = (base_model or recipe.target.gguf_file or recipe.target.model).rstrip("/").rpartition("/")[2]
    kind = recipe.drafter.kind
    method = load_drafter_class(kind).config_class.published_as or kind.replace("_", "-")
    method = "distilled" if data else method
    target = re.sub(r"[^\w.-]+", "-", target.removesuffix(".gguf"))[: LONGEST_NAME - len(method) - 1]
    return f"{target}-{method}"


def _stage(recipe: Recipe, card: Publication, dtype: torch.dtype | None) -> None:
    """Collect the drafter's files in the card's folder, the weights in `dtype` or unchanged."""
    run, folder = RunFolder(recipe), card.folder
    shutil.rmtree(folder, ignore_errors=True)
    for file in sorted(run.drafter.glob("*.safetensors*")):
        _add(file, folder / file.name)
    for name in ("config.json", TRAINING_FILE):
        _add(run.drafter / name, folder / name, "restore it, or train again")
    if dtype is not None:
        _convert(folder, dtype)
    shown = yaml.safe_dump(public_recipe(recipe), sort_keys=False, allow_unicode=True)
    write_atomically(folder / "recipe.yaml", shown)
    if card_figures(recipe) is not None:
        _add(run.eval / "result.json", folder / "eval" / "result.json", "run `draftsmith report` again")
    if proof := recorded_proof(recipe):
        _write(folder / "eval" / "proof.json", proof)
    update_card(recipe, card)


def _convert(folder: Path, dtype: torch.dtype) -> None:
    """Replace the linked weights by copies in another dtype, and update dtype and hashes in the JSON files."""
    for file in folder.glob("*.safetensors"):
        weights = {
            name: value.to(dtype) if value.is_floating_point() else value for name, value in load_file(file).items()
        }
        file.unlink()
        save_file(weights, file, {"format": "pt"})
    for name, key, value in (
        ("config.json", "dtype", str(dtype).removeprefix("torch.")),
        (TRAINING_FILE, "weights_sha256", weights_sha256(folder)),
    ):
        values = json.loads((folder / name).read_text(encoding="utf-8"))
        _write(folder / name, {**values, key: value})


def get_license(model: str, local_only: bool = False) -> dict[str, str]:
    """Return the licence keys of a model's card; empty if the card names no licence or cannot be read.

    Args:
        local_only: Do not use the network.
    """
    folder = EMBEDDED_TARGET if model == "embedded" else Path(model)
    data = _read_front_matter(model, folder, local_files_only=local_only)
    licence = {key: str(data[key]) for key in LICENSE_KEYS if data.get(key)}
    if "://" not in licence.get("license_link", "://"):  # a file in the target's repository
        link = licence.pop("license_link")
        licence |= {} if folder.is_dir() else {"license_link": f"{constants.ENDPOINT}/{model}/blob/main/{link}"}
    return licence


def _get_prompts_licence(source: str, revision: str | None, local_only: bool) -> str:
    """Return the licence that a source of conversations has on its card; `unknown` if it names none."""
    if source == STDLIB:
        return STDLIB_LICENCE
    folder = Path(source)
    if not folder.is_dir() and not is_hub_name(source):
        return UNKNOWN_LICENCE
    card = _read_front_matter(source, folder, repo_type="dataset", revision=revision, local_files_only=local_only)
    named = card.get("license")
    return ", ".join(named) if isinstance(named, list) else str(named or UNKNOWN_LICENCE)


def _read_front_matter(name: str, folder: Path, **where: Any) -> dict[str, Any]:
    """Read the metadata of the card in a folder, else of that on the Hub; empty if it cannot be read."""
    try:
        card = folder / CARD_FILE if folder.is_dir() else Path(hf_hub_download(name, CARD_FILE, **where))
        return ModelCard.load(card).data.to_dict()
    except Exception:  # no card, no network, invalid YAML, ...: what is published has no licence
        return {}


def _add(source: Path, place: Path, way_out: str = "") -> None:
    """Link a file into the folder; JSON is copied instead, without secrets and local paths."""
    if source.suffix == ".json" and way_out:
        _write(place, read_json(source, dict[str, Any], way_out))
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(source.resolve())


def _write(file: Path, values: dict[str, Any]) -> None:
    write_json(file, masked(portable(values)))


def _checked_files(recipe: Recipe, folder: Path) -> dict[str, Path]:
    """Return the files of a folder by their names in the repository.

    Raises:
        UserError: A text file contains a local path or the user's token; the message names the file.
    """
    files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
    folders = {str(Path.home()), str(Path.cwd()), str(RunFolder(recipe).root.absolute())}
    private = {f"{folder.rstrip('/')}/": "a folder of this machine" for folder in folders if folder != "/"}
    if token := get_token():
        private[token] = "your token"
    for name, file in files.items():
        if file.suffix not in TEXTS:
            continue
        # Conversations may name any folder.
        is_of_answers = CARD_JSON in files and name != CARD_JSON
        names = [text for text in private if text == token or not is_of_answers]
        with file.open(encoding="utf-8", errors="replace") as lines:
            leak = next((private[text] for line in lines for text in names if text in line), None)
        if leak is not None:
            raise UserError(f"nothing was pushed: {name} contains {leak}: remove it from {file} or the recipe")
    return files


def _send(api: HfApi, repo: str, kind: str, folder: Path, files: list[str], revision: str | None, public: bool) -> str:
    """Upload the files as one commit, creating the repository if it is missing. Returns the commit's URL.

    Args:
        kind: `model` or `dataset`.
    """
    where: dict[str, Any] = {"repo_type": kind, "revision": revision}
    exists = _exists(api, repo, kind, public)
    if not exists:
        api.create_repo(repo, private=not public, exist_ok=True, repo_type=kind)
    if revision is not None:
        api.create_branch(repo, branch=revision, exist_ok=True, repo_type=kind)
    old = api.list_repo_files(repo, **where)
    done = api.upload_folder(
        repo_id=repo,
        folder_path=folder,
        commit_message=f"{'Update' if exists else 'Add'} the {'drafter' if kind == 'model' else 'distilled set'}",
        delete_patterns=[name for name in old if OURS.fullmatch(name) and name not in files],
        **where,
    )
    return str(done.commit_url)


def _exists(api: HfApi, repo: str, kind: str, public: bool) -> bool:
    """Check whether the repository exists.

    Raises:
        UserError: The repository is public without `--public`, private with it, or holds something else.
    """
    try:
        info: Any = api.repo_info(repo, repo_type=kind)
    except RepositoryNotFoundError:
        return False
    if bool(info.private) == public:
        state, way_out = ("private", "leave out --public") if info.private else ("public", "push with --public")
        raise UserError(f"nothing was pushed: {repo} is {state}: {way_out}, change it on its page, or use --repo")
    others = [file.rfilename for file in info.siblings or [] if file.rfilename not in (".gitattributes", CARD_FILE)]
    ours, what = {"model": (TRAINING_FILE, "draftsmith drafter"), "dataset": (CARD_JSON, "distilled set")}[kind]
    if others and ours not in others:
        raise UserError(
            f"nothing was pushed: {repo} exists and holds no {what} ({', '.join(others[:3])}): name another one with "
            "--repo"
        )
    return True
