"""mkdocs hook: what a page links to outside docs/ becomes part of the site.

The documents link to each other by their paths in the repository, so that they can be read there. On the site, docs/ is
the root: the links are rewritten, and the linked files are copied. A linked Markdown file becomes a page.
"""

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file outside docs/ that a page of the navigation or of docs/ links to."""
    root = Path(config.config_file_path).parent
    queue = [file for file in files if file.is_documentation_page()]
    for uri in _navigation(config.nav):
        if files.get_file_from_path(uri) is None and (root / uri).is_file():
            queue.append(_added(uri, root, files, config))
    while queue:
        file = queue.pop()
        for _, target, _ in LINK.findall(Path(str(file.abs_src_path)).read_text(encoding="utf-8")):
            uri = _site_path(_resolved(_repository_path(file.src_uri, root), target))
            if files.get_file_from_path(uri) is None and (root / uri).is_file():
                queue.extend(added for added in [_added(uri, root, files, config)] if added.is_documentation_page())
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the page's links from paths in the repository to paths on the site."""
    root = Path(config.config_file_path).parent
    here = _repository_path(page.file.src_uri, root)

    def rewritten(link: re.Match[str]) -> str:
        uri = _site_path(_resolved(here, link[2]))
        if files.get_file_from_path(uri) is None:
            return link[0]  # --strict reports it
        return link[1] + os.path.relpath(uri, PurePosixPath(page.file.src_uri).parent) + link[3]

    return LINK.sub(rewritten, markdown)


def _added(uri: str, root: Path, files: Files, config: MkDocsConfig) -> File:
    file = File.generated(config, uri, abs_src_path=str(root / uri))
    files.append(file)
    return file


def _navigation(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ()
    return [uri for entry in entries for uri in _navigation(entry)]


def _repository_path(uri: str, root: Path) -> PurePosixPath:
    """Where the source of a page of the site is in the repository."""
    return PurePosixPath("docs", uri) if (root / "docs" / uri).exists() else PurePosixPath(uri)


def _resolved(page: PurePosixPath, target: str) -> str:
    return os.path.normpath(page.parent / target)


def _site_path(path: str) -> str:
    return path.removeprefix("docs/")
