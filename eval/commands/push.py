"""`draftsmith push`: the run's drafter to the Hub, with the recipe, the figures and the model card that say what it is.

1. Everything that goes up is put together in `runs/<name>/hub/`, without a folder or secret of this machine.
2. It becomes one commit, so that nobody ever reads half a drafter. What the repository has already is not sent again.

What `draftsmith export` wrote into the run's `export/` goes with it, and so does what `--exports` names, made anew.
"""

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    constants,
    get_token,
    hf_hub_download,
)
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError
from rich.console import Console

from draftsmith.eval.artifacts.drafter import card_figures, update_card
from draftsmith.eval.artifacts.proof import recorded_proof
from draftsmith.models.base.drafter import MODEL_TYPE_PREFIX
from draftsmith.models.base.registry import TRAINING_FILE, check_as_trained, load_drafter_class, read_training
from draftsmith.models.formats.exporting import EXPORT_FILE, Export, export_run
from draftsmith.models.target.loading import EMBEDDED_TARGET
from draftsmith.models.weights import weights_sha256
from draftsmith.recipes.errors import UserError, masked
from draftsmith.recipes.hub import hub_id, told_in_one_sentence
from draftsmith.recipes.results import portable
from draftsmith.recipes.run_folder import RunFolder, alone_in_its_run, bytes_text, read_json, write_atomically
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.card import CARD_FILE, Publication, public_recipe

STAGED = "hub"
YOU = "YOU"  # in a name, before anybody asked the Hub who that is
LONGEST_NAME = 96  # of a repository
TEXTS = {".json", ".jsonl", ".md", ".yaml", ".yml", ".txt", ".jinja"}
# Of an earlier push, what is in this one no more: a shard too many would be weights that nobody trained.
OURS = re.compile(r"[^/]+\.(?:json|safetensors|yaml)|(?:eval|export)/.*")
DOWNLOADED = "drafter"  # where the card's commands put an export: no name that vLLM takes for a method
LICENSE_KEYS = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class PushOptions:
    """repo: `name` or `user/name`; base_model: the target's id on the Hub, where the recipe names its folder; license:
    as the Hub spells it, by default the target's; exports: formats to make."""

    repo: str | None = None
    revision: str | None = None
    public: bool = False
    base_model: str | None = None
    license: str | None = None
    exports: tuple[str, ...] = ()
    dry_run: bool = False


@dataclass
class Pushed:
    """address: of the commit; None if nothing was sent. files_bytes: by their names in the repository."""

    repo: str
    address: str | None
    files_bytes: dict[str, int]


@alone_in_its_run("push")
def push(recipe: Recipe, options: PushOptions, console: Console) -> Pushed:
    """Send the run's drafter to the Hub.

    Raises:
        UserError: There is no trained drafter, something of this machine would go up, or the Hub refuses.
    """
    _check_trained(recipe)
    if options.base_model is not None and hub_id(options.base_model) is None:
        raise UserError(f"option --base-model: {options.base_model} is no id of the Hub: give owner/name")
    api, repo = HfApi(), options.repo or default_name(recipe, options.base_model)
    if options.dry_run:
        repo = repo if "/" in repo else f"{YOU}/{repo}"
    else:
        with told_in_one_sentence("nothing was pushed", repo):
            user = api.whoami()["name"]
        repo = repo if "/" in repo else f"{user}/{repo}"
    if hub_id(repo) is None or len(repo.rpartition("/")[2]) > LONGEST_NAME:
        raise UserError(f"option --repo: {repo} is no name of a repository: give name or user/name")
    for to in options.exports:
        console.print(export_run(recipe, to, None).lines()[0], markup=False)
    card = Publication(RunFolder(recipe).root / STAGED, repo, options.base_model, license_of(recipe, options))
    if not card.license:
        console.print("The card names no licence, as the target's tells none: --license gives one", markup=False)
    files = stage(recipe, card)
    console.print(f"{repo}: {len(files)} files, {bytes_text(sum(map(_size, files.values())))}", markup=False)
    for name, file in files.items():
        console.print(f"  {bytes_text(_size(file)):>10}  {name}", markup=False)
    if options.dry_run:
        console.print(f"Nothing was sent; it lies in {RunFolder(recipe).root / STAGED}", markup=False)
        return Pushed(repo, None, {name: _size(file) for name, file in files.items()})
    address = _send(api, repo, files, options)
    console.print(f"\nPushed    {address}", markup=False)
    at = "" if options.revision is None else f"@{options.revision}"
    console.print(f"Use it    {{name: tree, tree: best_first, drafter: {repo}{at}}} in eval.methods", markup=False)
    return Pushed(repo, address, {name: _size(file) for name, file in files.items()})


def default_name(recipe: Recipe, base_model: str | None = None) -> str:
    """`{target}-{method}`, the method spelled as engines detect it."""
    target = (base_model or recipe.target.gguf_file or recipe.target.model).rstrip("/").rpartition("/")[2]
    kind = recipe.drafter.kind
    method = load_drafter_class(kind).published_as or kind.replace("_", "-")
    target = re.sub(r"[^\w.-]+", "-", target.removesuffix(".gguf"))[: LONGEST_NAME - len(method) - 1]
    return f"{target}-{method}"


def stage(recipe: Recipe, card: Publication) -> dict[str, Path]:
    """Put together what goes up in the card's folder. Returns its files by their names in the repository.

    Args:
        card: Gets its pictures and exports here.

    Raises:
        UserError: Something of this machine would go up.
    """
    run = RunFolder(recipe)
    folder = card.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in sorted(run.drafter.glob("*.safetensors*")):
        _link(file, folder / file.name)
    for name in ("config.json", TRAINING_FILE):
        _write_public(run.drafter / name, folder / name, "restore it, or train again")
    shown = yaml.safe_dump(public_recipe(recipe), sort_keys=False, allow_unicode=True)
    write_atomically(folder / "recipe.yaml", shown)
    if card_figures(recipe) is not None:
        if (run.eval / "result.json").is_file():  # earlier versions wrote none
            _write_public(run.eval / "result.json", folder / "eval" / "result.json", "run `draftsmith report` again")
        for file in sorted(run.eval.glob("*.png")):
            _link(file, folder / "eval" / file.name)
            card.pictures.append(f"eval/{file.name}")
    if proof := recorded_proof(recipe):
        write_atomically(folder / "eval" / "proof.json", json.dumps(masked(portable(proof)), indent=2) + "\n")
    card.exports = _stage_exports(recipe, card)
    update_card(recipe, card)
    files = {f.relative_to(folder).as_posix(): f for f in sorted(folder.rglob("*")) if f.is_file()}
    _refuse_private(recipe, files)
    return files


def _stage_exports(recipe: Recipe, card: Publication) -> dict[str, str | None]:
    """Those of these weights. Returns the command that serves each after a download, by its folder.

    Raises:
        UserError: One is of other weights.
    """
    run, commands = RunFolder(recipe), {}
    folder, target = card.folder, card.base_model or public_recipe(recipe)["target"]["model"]
    for noted in sorted((run.root / "export").glob(f"*/{EXPORT_FILE}")):
        export, name = noted.parent, f"export/{noted.parent.name}"
        made = read_json(noted, Export, f"delete {export}, and export again")
        if made.drafter_sha256 != weights_sha256(run.drafter):
            again = f"`draftsmith export --to {made.to}` makes it anew"
            raise UserError(f"nothing was pushed: {export} was made of other weights: delete it, or {again}")
        places = ((str(export.absolute()), f"{DOWNLOADED}/{name}"), (made.target, target))
        for here, there in places if made.command else ():
            made.command = str(made.command).replace(here, there)
        made.target = target
        for file in sorted(export.glob("*")):
            if file.suffix == ".json" and file.name != EXPORT_FILE:
                _write_public(file, folder / name / file.name, f"delete {export}, and export again")
            elif file.is_file() and file.name != EXPORT_FILE:
                _link(file, folder / name / file.name)
        write_atomically(folder / name / EXPORT_FILE, json.dumps(portable(asdict(made)), indent=2) + "\n")
        commands[name] = made.command
    return commands


def license_of(recipe: Recipe, options: PushOptions) -> dict[str, str]:
    """The one that was asked for, else the target's own; nothing where its card tells none."""
    if options.license is not None:
        return {"license": options.license}
    model = options.base_model or recipe.target.model
    folder = EMBEDDED_TARGET if model == "embedded" else Path(model)
    try:
        card = folder / CARD_FILE
        if not folder.is_dir():
            card = Path(hf_hub_download(model, CARD_FILE, local_files_only=options.dry_run))
        said = ModelCard.load(card).data.to_dict()
    except Exception:  # of any kind: no card, no network, no YAML; the drafter goes up without a license
        return {}
    found = {key: str(said[key]) for key in LICENSE_KEYS if said.get(key)}
    if "://" not in found.get("license_link", "://"):  # a file beside the target's card
        link = found.pop("license_link")
        found |= {} if folder.is_dir() else {"license_link": f"{constants.ENDPOINT}/{model}/blob/main/{link}"}
    return found


def _check_trained(recipe: Recipe) -> None:
    """Whether the drafter is finished, as it was trained, and of this recipe."""
    folder = RunFolder(recipe).drafter
    if not (folder / TRAINING_FILE).is_file():
        raise UserError(f"{folder} holds no trained drafter: run `draftsmith train` with this recipe first")
    kind = check_as_trained(folder)
    trained = {"drafter.kind": kind, **read_training(folder).settings}
    for key, value in (("drafter.kind", recipe.drafter.kind), ("target.model", recipe.target.model)):
        if trained.get(key, value) != value:
            raise UserError(f"key `{key}`: {folder} was trained with {trained[key]}, not {value}: give its own recipe")


def _write_public(source: Path, copy: Path, way_out: str) -> None:
    values = read_json(source, dict[str, Any], way_out)
    write_atomically(copy, json.dumps(masked(portable(values)), indent=2) + "\n")


def _link(source: Path, place: Path) -> None:
    """A second name where the disk allows it, which takes no room; else a copy."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), place)
    except OSError:
        shutil.copyfile(source, place)


def _refuse_private(recipe: Recipe, files: dict[str, Path]) -> None:
    """Whatever was written there, by us or by hand: no folder and no token of this machine."""
    folders = {str(Path.home()), str(Path.cwd()), str(RunFolder(recipe).root.absolute())}
    private = {f"{folder.rstrip('/')}/": "a folder of this machine" for folder in folders if folder != "/"}
    if token := get_token():
        private[token] = "your token"
    for name, file in files.items():
        if file.suffix not in TEXTS:
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        found = next((what for needle, what in private.items() if needle in text), None)
        if found is not None:
            raise UserError(f"nothing was pushed: {name} names {found}; take it out of {file} where it comes from")


def _send(api: HfApi, repo: str, files: dict[str, Path], options: PushOptions) -> str:
    """One commit in the repository, which is made if it is not there. Returns the commit's address."""
    with told_in_one_sentence("nothing was pushed", repo):
        there = _existing(api, repo, options)
        if not there:
            api.create_repo(repo, private=not options.public, exist_ok=True)
        if options.revision is not None:
            api.create_branch(repo, branch=options.revision, exist_ok=True)
        old = api.list_repo_files(repo, revision=options.revision)
        stale = [name for name in old if OURS.fullmatch(name) and name not in files]
        operations: list[CommitOperationAdd | CommitOperationDelete] = [CommitOperationDelete(name) for name in stale]
        operations += [CommitOperationAdd(name, file) for name, file in files.items()]
        message = "Update the drafter" if there else "Add the drafter"
        done = api.create_commit(repo, operations, commit_message=message, revision=options.revision)
    return str(done.commit_url)


def _existing(api: HfApi, repo: str, options: PushOptions) -> bool:
    """Whether the repository is there.

    Raises:
        UserError: It is open to everybody and that was not asked for, or the other way round, or no drafter's.
    """
    try:
        info = api.model_info(repo)
    except RepositoryNotFoundError:
        return False
    if bool(info.private) == options.public:
        state, way_out = ("private", "leave out --public") if info.private else ("public", "push with --public")
        raise UserError(f"nothing was pushed: {repo} is {state}: {way_out}, change it on its page, or use --repo")
    others = [file.rfilename for file in info.siblings or [] if file.rfilename not in (".gitattributes", CARD_FILE)]
    if others and not _is_drafter(repo):
        raise UserError(
            f"nothing was pushed: {repo} is there and is no drafter of draftsmith ({', '.join(others[:3])}): name "
            "another with --repo"
        )
    return True


def _is_drafter(repo: str) -> bool:
    try:
        config = json.loads(Path(hf_hub_download(repo, "config.json")).read_text(encoding="utf-8"))
    except (EntryNotFoundError, ValueError):
        return False
    return str(config.get("model_type", "")).startswith(MODEL_TYPE_PREFIX)


def _size(file: Path) -> int:
    return file.stat().st_size
