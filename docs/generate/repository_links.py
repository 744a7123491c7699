"""mkdocs hook: links from a page to files of the repository outside `docs/` work in the built site.

Pages link as they do in a checkout, relative to their own file: `[verify.py](../../eval/trees/verify.py)`. With a
`repo_url` in mkdocs.yml such links go there. Without one the site brings the files along, as text under `source/`;
of a folder that is what its `__init__.py` or README.md says. `PAGES` are pages of the site.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"""(?<=\]\()[^)\s]+(?=\))|(?<= src=")[^"]+|(?<= srcset=")[^"]+""")
ELSEWHERE = r"[a-z]+:|#|/"  # links to something else than a file of the repository
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}  # files of the repository that are pages of the site


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie elsewhere, and copies of all files that pages link to."""
    for name, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    for page in files.documentation_pages():
        for link in LINK.findall(page.content_string):
            place = _in_repository(link, page.src_uri)
            if place is not None and not config.repo_url and files.get_file_from_path(_copied_uri(place)) is None:
                files.append(File.generated(config, _copied_uri(place), content=_source_file(place).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links out of `docs/` at the repository, or at the copies."""

    def point(match: re.Match[str]) -> str:
        link, uri = match[0], page.file.src_uri
        if re.match(ELSEWHERE, link):
            return link
        _, hash_sign, anchor = link.partition("#")
        place = _in_repository(link, uri)
        if place is not None and config.repo_url:
            return f"{config.repo_url.rstrip('/')}/blob/main/{place}{hash_sign}{anchor}"
        ours = _repository_path(link, uri)
        site_uri = _copied_uri(place) if place is not None else PAGES.get(ours, ours.removeprefix("docs/"))
        return posixpath.relpath(site_uri, posixpath.dirname(uri) or ".") + hash_sign + anchor

    return LINK.sub(point, markdown)


def _repository_path(link: str, uri: str) -> str:
    """Return a link's path from the top of the repository."""
    folder = "" if uri in PAGES.values() else posixpath.join("docs", posixpath.dirname(uri))
    return posixpath.normpath(posixpath.join(folder, link.partition("#")[0]))


def _in_repository(link: str, uri: str) -> str | None:
    """Return the linked file or folder of the repository outside the site; None for any other link."""
    if re.match(ELSEWHERE, link):
        return None
    name = _repository_path(link, uri)
    return None if name in PAGES or name == "docs" or name.startswith("docs/") else name


def _copied_uri(name: str) -> str:
    file = _source_file(name)
    return f"source/{file.relative_to(ROOT).as_posix()}.txt"


def _source_file(name: str) -> Path:
    """Return the file of this name; for a folder its `__init__.py` or `README.md`.

    Raises:
        PluginError: The file does not exist.
    """
    place = ROOT / name
    for file in (place, place / "__init__.py", place / "README.md"):
        if file.is_file():
            return file
    raise PluginError(f"a page links to {name}, which is no file of the repository, or a folder that says nothing")
