"""A model of torch's caching allocator for CUDA: the bytes it reserves for a sequence of allocations and frees.

It follows ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.13 with default settings, and with ``expandable_segments``.
Memory is taken from the device in segments. A segment is cut into blocks, and blocks that are free and adjacent are
joined. Addresses are numbers; no memory is allocated.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIB = 2**20
BLOCK_BYTES = 512  # sizes of blocks are multiples of this
SMALL_BYTES = MIB  # larger blocks are in segments of their own class
SMALL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES = 2 * MIB, 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB  # a block of at least so many bytes gets a segment of its own size, in multiples of:
OWN_SEGMENT_MULTIPLE = 2 * MIB
SPACE_BYTES = 2**50 // LARGE_SEGMENT_BYTES * LARGE_SEGMENT_BYTES  # addresses of an expandable segment: endless


class DoesNotFitError(Exception):
    """An allocation is above the limit even after all unused segments were released."""


@dataclass(eq=False)
class Block:
    """Part of a segment. In an expandable segment it may be address space without memory.

    Attributes:
        before, after: the neighbours in the segment.
        has_memory: False for address space alone.
    """

    pool: "_Pool"
    address: int
    num_bytes: int
    is_free: bool = True
    has_memory: bool = True
    before: "Block | None" = None
    after: "Block | None" = None

    @property
    def is_whole_segment(self) -> bool:
        """Whether the segment has no other block."""
        return self.before is None and self.after is None

    @property
    def room_bytes(self) -> int:
        """The bytes that a free block has once its segment is expanded."""
        after = self.after
        return self.num_bytes + (after.num_bytes if after and not after.has_memory else 0)


def ceil_to(num_bytes: int, multiple: int) -> int:
    """``num_bytes`` rounded up to a multiple."""
    return -(-num_bytes // multiple) * multiple


@dataclass(eq=False)
class _Pool:
    """Blocks of one stream that are small, or of one that are large, and not in use.

    Attributes:
        segment_bytes: the size of a segment for several blocks; in expandable segments of a page.
        free: blocks with memory, the smallest first, and of equal ones the one with the lowest address.
        space: blocks without memory, by address.
    """

    segment_bytes: int
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    space: list[tuple[int, Block]] = field(default_factory=list)

    def put(self, block: Block) -> None:
        """Add a block that is not in use."""
        if block.has_memory:
            insort(self.free, (block.num_bytes, block.address, block))
        else:
            insort(self.space, (block.address, block))

    def take(self, block: Block) -> None:
        """Remove a block."""
        if block.has_memory:
            del self.free[bisect_left(self.free, (block.num_bytes, block.address))]
        else:
            del self.space[bisect_left(self.space, (block.address,))]


class CachingAllocator:
    """The allocator of one device.

    Not modelled: ``max_split_size_mb``, ``roundup_power2_divisions``, ``garbage_collection_threshold``,
    ``backend:cudaMallocAsync`` and the private pools of CUDA graphs.

    Args:
        limit_bytes: the most that it may reserve, as ``torch.cuda.set_per_process_memory_fraction`` sets it.
        expandable: as with ``expandable_segments:True``.

    Attributes:
        allocated_bytes, reserved_bytes: as ``torch.cuda.memory_allocated`` and ``memory_reserved`` return them.
        peak_reserved_bytes: the most that was reserved.
        retries: how often unused segments were released to make an allocation possible.

    >>> allocator = CachingAllocator()
    >>> block = allocator.allocate(3 * MIB)
    >>> allocator.free(block)
    >>> allocator.allocated_bytes, allocator.reserved_bytes // MIB
    (0, 20)
    """

    def __init__(self, *, limit_bytes: float = float("inf"), expandable: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.allocated_bytes = self.reserved_bytes = self.peak_reserved_bytes = self.retries = 0
        self._is_expandable = expandable
        self._end = 0  # of all addresses so far. None is used twice, so that a segment's address tells its age.
        self._pools: dict[tuple[int, bool], _Pool] = {}

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        """A block of at least ``num_bytes``, which must be positive, for one of the device's streams.

        Raises:
            DoesNotFitError: it would be above the limit.
        """
        num_bytes = ceil_to(num_bytes, BLOCK_BYTES)
        is_small = num_bytes <= SMALL_BYTES
        segment_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        pool = self._pools.setdefault((stream, is_small), _Pool(segment_bytes))
        block = self._best_fit(pool, num_bytes) or self._reserve(pool, num_bytes)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._reserve(pool, num_bytes)
        if block is None:
            raise DoesNotFitError(f"{num_bytes} bytes do not fit, with {self.reserved_bytes} bytes reserved")
        rest_bytes = block.num_bytes - num_bytes
        if rest_bytes > (0 if is_small or self._is_expandable else SMALL_BYTES):
            pool.put(self._cut(block, num_bytes))
        block.is_free = False
        self.allocated_bytes += block.num_bytes
        return block

    def free(self, block: Block) -> None:
        """End the use of a block. Its memory stays reserved."""
        self.allocated_bytes -= block.num_bytes
        block.is_free = True
        self._join(block)
        block.pool.put(block)

    def empty_cache(self) -> None:
        """Release the segments that are free as a whole; of expandable segments, the pages."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self._is_expandable:
                    self._release_pages(block)
                elif block.is_whole_segment:
                    pool.take(block)
                    self.reserved_bytes -= block.num_bytes

    def _best_fit(self, pool: _Pool, num_bytes: int) -> Block | None:
        """Take the smallest free block that is large enough, if there is one."""
        place = bisect_left(pool.free, (num_bytes,))
        if place == len(pool.free):
            return None
        if self._is_expandable:  # one that can still grow is worth its later size
            following = place + 1
            while following < len(pool.free) and pool.free[following][2].room_bytes < pool.free[place][2].room_bytes:
                place, following = following, following + 1
        return pool.free.pop(place)[2]

    def _reserve(self, pool: _Pool, num_bytes: int) -> Block | None:
        """A block with new memory, which may be larger; None if that would be above the limit."""
        has_own = num_bytes >= OWN_SEGMENT_BYTES
        segment_bytes = ceil_to(num_bytes, OWN_SEGMENT_MULTIPLE) if has_own else pool.segment_bytes
        if self.reserved_bytes + segment_bytes > self.limit_bytes:
            return None
        if self._is_expandable:
            return self._expand(pool, num_bytes)
        self._count(segment_bytes)
        return Block(pool, self._new_addresses(segment_bytes), segment_bytes)

    def _count(self, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _new_addresses(self, num_bytes: int) -> int:
        self._end += num_bytes
        return self._end - num_bytes

    def _cut(self, block: Block, num_bytes: int) -> Block:
        """Keep the first bytes of a block, and return the rest."""
        rest = Block(
            block.pool,
            block.address + num_bytes,
            block.num_bytes - num_bytes,
            has_memory=block.has_memory,
            before=block,
            after=block.after,
        )
        if rest.after:
            rest.after.before = rest
        block.after, block.num_bytes = rest, num_bytes
        return rest

    def _join(self, block: Block) -> None:
        """Join a block that is in no list with those neighbours that are free and alike."""
        before, after = block.before, block.after
        if before and before.is_free and before.has_memory is block.has_memory:
            before.pool.take(before)
            block.address, block.before = before.address, before.before
            block.num_bytes += before.num_bytes
            if block.before:
                block.before.after = block
        if after and after.is_free and after.has_memory is block.has_memory:
            after.pool.take(after)
            block.num_bytes, block.after = block.num_bytes + after.num_bytes, after.after
            if block.after:
                block.after.before = block

    # ---- expandable segments

    def _expand(self, pool: _Pool, num_bytes: int) -> Block:
        """Give memory to the first addresses with room for so many bytes, next to a free block if there is one."""
        starts = (_start_with_room(space, num_bytes) for _, space in pool.space)
        block = next((start for start in starts if start), None)
        if block is None:
            block = Block(pool, self._new_addresses(SPACE_BYTES), SPACE_BYTES, has_memory=False)
            pool.put(block)
        if not block.has_memory:
            block = self._back(block, min(block.num_bytes, num_bytes))
        while block.num_bytes < num_bytes:
            assert block.after  # there is room
            block = self._back(block.after, min(num_bytes - block.num_bytes, block.after.num_bytes))
        pool.take(block)
        return block

    def _back(self, space: Block, num_bytes: int) -> Block:
        """Give memory to the first pages of address space. Returns the free block that they are in."""
        pool = space.pool
        pool.take(space)
        num_bytes = ceil_to(num_bytes, pool.segment_bytes)
        if num_bytes < space.num_bytes:
            pool.put(self._cut(space, num_bytes))
        space.has_memory = True
        self._count(num_bytes)
        self._join(space)
        pool.put(space)
        return space

    def _release_pages(self, block: Block) -> None:
        """Take the memory of whole pages from a free block."""
        pool = block.pool
        start = ceil_to(block.address, pool.segment_bytes)
        end = (block.address + block.num_bytes) // pool.segment_bytes * pool.segment_bytes
        if start >= end:
            return
        pool.take(block)
        if start > block.address:
            pages = self._cut(block, start - block.address)
            pool.put(block)
            block = pages
        if end < block.address + block.num_bytes:
            pool.put(self._cut(block, end - block.address))
        self.reserved_bytes -= block.num_bytes
        block.has_memory = False
        self._join(block)
        if not block.is_whole_segment:  # else its addresses are given back, too
            pool.put(block)


def _start_with_room(space: Block, num_bytes: int) -> Block | None:
    """The block from which on so many bytes are free, with memory or without; None if there are fewer."""
    start = space.before if space.before and space.before.is_free else space
    room_bytes, block = 0, start
    while block and block.is_free and room_bytes < num_bytes:
        room_bytes, block = room_bytes + block.num_bytes, block.after
    return start if room_bytes >= num_bytes else None
