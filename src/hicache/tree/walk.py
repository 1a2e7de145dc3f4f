"""The way from a root down a prompt: runs are compared whole, at memcmp speed; only inserting cuts a node."""

import numpy as np

from hicache.tree.core import TOKEN_BYTES, Core
from hicache.tree.node import Node
from hicache.tree.shape import split


def blocks_of(core: Core, tokens: bytes) -> bytes:
    """A prompt as the tree compares it: each page with the tokens after it that are part of its identity.

    Without lookahead that is the prompt itself. `tokens`: little-endian uint32.
    """
    ahead = core.lookahead_tokens
    if not ahead:
        return tokens
    size = core.page_size
    ids = np.frombuffer(tokens, np.uint32, len(tokens) // TOKEN_BYTES)
    pages = max(0, (len(ids) - ahead) // size)
    view = np.lib.stride_tricks.as_strided(ids, (pages, size + ahead), (size * TOKEN_BYTES, TOKEN_BYTES))
    return view.tobytes()


def walk(core: Core, root: Node, path: list[Node], blocks: bytes, limit: int, cut: bool) -> tuple[list[Node], int]:
    """Follows `blocks` up to byte `limit` (whole blocks). Returns the nodes met and how many bytes are in the tree.

    `path`: the nodes from below the root on that are known to be met; those met after them are added to it.

    The last node may be met in part only; with `cut` it is split there if the prompt goes another way.
    """
    append = path.append
    startswith = blocks.startswith
    block = core.block_bytes
    last = path[-1] if path else root
    children = last.children
    offset = core.stop(last) * block
    while offset < limit:
        node = children.get(blocks[offset : offset + block])
        if node is None:
            break
        key = node.key
        size = len(key)
        if size == block or startswith(key, offset, limit):
            append(node)
            offset += size
            children = node.children
            continue
        same = _common_blocks(key, blocks, offset, limit, block)
        offset += same * block
        if cut and offset < limit:
            node = split(core, node, node.start + same)
        append(node)
        break
    return path, offset


def _common_blocks(key: bytes, blocks: bytes, offset: int, limit: int, block: int) -> int:
    """How many whole blocks a node's key shares with `blocks` from `offset` on; at least 1."""
    tokens = min(len(key), limit - offset) // TOKEN_BYTES
    differ = np.frombuffer(key, np.uint32, tokens) != np.frombuffer(blocks, np.uint32, tokens, offset)
    first = int(differ.argmax())
    return (first if differ[first] else tokens) * TOKEN_BYTES // block
