"""Prefixes go to files and come back; what a cache takes of a file was checked first, all of it."""

import time
from pathlib import Path

from hicache.cache.namespaces import require_fitting
from hicache.cache.prefixes import Export, Imported, put_in, require_one_rank, take_out
from hicache.cache.tokens import Tokens, token_bytes
from hicache.cache.upkeep import Upkeep
from hicache.controller import Patience
from hicache.errors import ConfigError
from hicache.keys import TOKEN_BYTES, Namespace
from hicache.storage.prefix_file import PrefixContent, read_prefix, write_prefix

_LOOK_S = 0.001
_PATIENCE = Patience("wait_complete")


class Portable(Upkeep):
    """The part of the door through which whole prefixes go."""

    def begin_export(self, tokens: Tokens, namespace: Namespace) -> Export:
        """Bring what storage and device have of a prompt's full pages to the host. Poll until `export_ready`.

        Raises ConfigError with several ranks, and for a prompt without a full page.
        """
        self._require_open()
        require_one_rank(self._controller)
        lookahead = self._controller.state.tree.lookahead_tokens
        require_fitting(namespace, lookahead, alone=True)
        raw = token_bytes(tokens)
        pages = max(0, len(raw) // TOKEN_BYTES - lookahead) // self._page_size
        if pages == 0:
            raise ConfigError(f"{len(raw) // TOKEN_BYTES} tokens are less than a page; there is nothing to export")
        ticket = self._controller.prefetch(namespace.fingerprint, raw, pages, _PATIENCE)
        tree = self._controller.state.tree
        found = tree.match(namespace.fingerprint, raw, pages)
        if found.pages:
            self._controller.write(tree.span(found, 0, found.pages), self._controller.written(None))
        return Export(namespace, raw, pages, ticket)

    def export_ready(self, export: Export) -> bool:
        """Whether nothing more is on its way to the host for an export."""
        self._require_open()
        return export.ticket.done and not self._controller.writing_back

    def finish_export(self, export: Export) -> PrefixContent:
        """Copy the longest prefix that can be resumed out of host memory, for `write_prefix`.

        Raises CapacityError if there is none.
        """
        self._require_open()
        self._controller.cancel_prefetch(export.ticket)
        return take_out(self._controller, export)

    def export_prefix(self, tokens: Tokens, namespace: Namespace, path: str | Path) -> int:
        """Write what is cached of a prompt's full pages to one safetensors file (0600); returns how many pages.

        Blocks for transfers and the disk, as an engine that serves must not: that one uses the three steps above and
        `hicache.storage.prefix_file.write_prefix`. Raises StorageError if the file can't be written.
        """
        export = self.begin_export(tokens, namespace)
        while not self.export_ready(export):
            time.sleep(_LOOK_S)
            self.poll()
        content = self.finish_export(export)
        write_prefix(Path(path), content)
        return content.pages

    def import_prefix(self, path: str | Path, namespace: Namespace) -> Imported:
        """Take an exported prefix into host memory, as far as there is room, and offer it to the store.

        Nothing is taken of a file that is damaged (StorageError) or of another namespace or layout (ConfigError): the
        message says why. Reads the whole file: an engine that serves does so elsewhere, and calls `take_prefix`.
        """
        return self.take_prefix(read_prefix(Path(path)), namespace)

    def take_prefix(self, content: PrefixContent, namespace: Namespace) -> Imported:
        """As `import_prefix`, of what `hicache.storage.prefix_file.read_prefix` has read."""
        self._require_open()
        require_fitting(namespace, self._controller.state.tree.lookahead_tokens, alone=True)
        return put_in(self._controller, content, namespace)
