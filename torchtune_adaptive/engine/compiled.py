"""Code that torch compiles for each size of a batch."""

_SHAPES = 256  # more would have no effect: it is torch's `accumulated_recompile_limit`


def compile_each_size() -> None:
    """Let torch compile a function for 256 shapes; after 8 it would compile it for no other.

    Flex attention, and whatever is compiled with ``dynamic=False``, is compiled anew for each size of a batch, with
    LoRA even twice. Where flex attention is not compiled, it is several times slower and holds the scores of all pairs
    of tokens. The setting is torch's, for the whole process; a larger one is kept.
    """
    from torch._dynamo import config  # which takes a second to import

    config.recompile_limit = max(config.recompile_limit, _SHAPES)
