"""The library UCX (libucp) by ctypes: memory that is exposed, endpoints, gets, puts and atomics.

Structures hold the fields that are used, and spare room behind them: later versions add fields, which a mask leaves
out. One libucp serves a process: that which is loaded already, as MPI's is, else that of ucx-py, of MPI's wheel, of the
system, or of the wheel libucx. docs/reference/windows.md tells users of it.
"""

from __future__ import annotations

import atexit
import ctypes as C
import ctypes.util
import glob
import os
import select
import site
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import RLock, Thread, get_ident
from typing import Any, NamedTuple

from rma_mm.errors import AbsentError, WindowError
from rma_mm.windows.boxes.runs import Runs
from rma_mm.windows.waiting import HELPERS, add_poller

OLDEST = (1, 10)  # the first version with all calls that are made here
FIELD_FEATURES, RMA, AMO64, WAKEUP = 1, 1 << 1, 1 << 3, 1 << 4
FIELD_THREADS, MULTI = 1, 2
MAP_ADDRESS, MAP_LENGTH, MAP_FLAGS, MAP_ALLOCATE = 1, 2, 4, 2
QUERY_ADDRESS, QUERY_LENGTH = 1, 2
EP_ADDRESS = 1
WITH_DATATYPE, WITH_REPLY, EIGHT_BYTES = 8, 32, 8 << 3
ADD, SWAP = 0, 1
OK, IN_PROGRESS = 0, 1
LAST_ERROR = 256  # pointers from −256 to −1 are errors, as statuses are
LOCKS, LOCK = 64, 64  # locks of a process, and bytes from one to the next
BURST = 64  # looks of a listener before others may call the library again
RESTS, LONGEST_REST = 4, 3e-3
"""A listener rests this many times as long as it worked, at most the given number of seconds: it takes the core from a
multiply, and the system's buffers take what comes meanwhile."""
ASLEEP = 1000  # milliseconds for which a listener sleeps at most
P, U64, SIZE = C.c_void_p, C.c_uint64, C.c_size_t


def structure(name: str, *fields: tuple[str, Any]) -> Any:
    return type(name, (C.Structure,), {"_fields_": [*fields, ("spare", C.c_ubyte * 512)]})


ContextParams = structure("ContextParams", ("mask", U64), ("features", U64))
WorkerParams = structure("WorkerParams", ("mask", U64), ("threads", C.c_int))
MapParams = structure("MapParams", ("mask", U64), ("address", P), ("length", SIZE), ("flags", C.c_uint))
MemoryFacts = structure("MemoryFacts", ("mask", U64), ("address", P), ("length", SIZE))
EndpointParams = structure("EndpointParams", ("mask", U64), ("address", P))
RequestParams = structure(
    "RequestParams", ("mask", C.c_uint32), ("flags", C.c_uint32), ("request", P), ("callback", P), ("datatype", U64),
    ("user", P), ("reply", P),
)  # fmt: skip
NOTHING_MORE = RequestParams()
PLAIN = C.byref(NOTHING_MORE)  # parameters for calls that need none beyond their arguments
Steps = Iterator[None]  # work that is left: each step ends if there is nothing to do but wait
Done = Callable[[], bool]
"""A function that tells if something is over, gives it progress, and raises WindowError if it failed."""

CALLS: dict[str, tuple[Any, ...]] = {
    "ucp_init_version": (C.c_byte, C.c_uint, C.c_uint, P, P, P),
    "ucp_worker_create": (C.c_byte, P, P, P),
    "ucp_worker_get_address": (C.c_byte, P, P, P),
    "ucp_worker_release_address": (None, P, P),
    "ucp_worker_progress": (C.c_uint, P),
    "ucp_worker_get_efd": (C.c_byte, P, P),
    "ucp_worker_arm": (C.c_byte, P),
    "ucp_mem_map": (C.c_byte, P, P, P),
    "ucp_mem_query": (C.c_byte, P, P),
    "ucp_mem_unmap": (C.c_byte, P, P),
    "ucp_rkey_pack": (C.c_byte, P, P, P, P),
    "ucp_rkey_buffer_release": (None, P),
    "ucp_ep_create": (C.c_byte, P, P, P),
    "ucp_ep_rkey_unpack": (C.c_byte, P, P, P),
    "ucp_rkey_ptr": (C.c_byte, P, U64, P),
    "ucp_rkey_destroy": (None, P),
    "ucp_get_nbx": (C.c_ssize_t, P, P, SIZE, U64, P, P),
    "ucp_put_nbx": (C.c_ssize_t, P, P, SIZE, U64, P, P),
    "ucp_atomic_op_nbx": (C.c_ssize_t, P, C.c_int, P, SIZE, U64, P, P),
    "ucp_ep_flush_nbx": (C.c_ssize_t, P, P),
    "ucp_request_check_status": (C.c_byte, P),
    "ucp_request_free": (None, P),
}
"""Result and arguments of each call; a pointer that may be an error is a number."""


class Mapped(NamedTuple):
    """Memory that others can be given a key to."""

    handle: Any
    address: int
    key: bytes  # bytes that others unpack


class Ucp:
    """The library with this process's one context and worker; calls are made one at a time."""

    def __init__(self) -> None:
        self.path, self.lib, self.version = loaded()
        self.lock = RLock()  # held while the library is called
        self.context, self.worker = P(), P()
        self._shared = shared_with_ucx_py()
        if self._shared is not None:
            self.context.value, self.worker.value = (each.handle for each in self._shared)
            atexit.register(log_from, self.path, b"fatal")  # it takes its context away while memory is still exposed
        else:
            wanted = ContextParams(mask=FIELD_FEATURES, features=RMA | AMO64 | WAKEUP)
            tried = f"{self.path} does not start"
            with quiet(self.path):
                status = self.lib.ucp_init_version(*OLDEST, C.byref(wanted), None, C.byref(self.context))
            require(status, tried)
            workers = WorkerParams(mask=FIELD_THREADS, threads=MULTI)
            require(self.lib.ucp_worker_create(self.context, C.byref(workers), C.byref(self.worker)), tried)
        self.address = self._packed("ucp_worker_get_address", self.worker)
        self.endpoints: dict[bytes, Endpoint] = {}
        self.locks = self.expose(None, LOCKS * LOCK)
        """Words that other ranks swap 1 into while they alone may add to memory of this process."""
        C.memset(self.locks.address, 0, LOCKS * LOCK)
        self._listener: Thread | None = None
        add_poller(self.poll)

    def poll(self) -> None:
        """Drive the progress of transfers, also for other ranks. From any thread; where another is at it, nothing."""
        if self.lock.acquire(blocking=False):
            try:
                self.advance()
            finally:
                self.lock.release()

    def advance(self) -> bool:
        """Go on with all that is under way, as far as can be now; whether anything could."""
        has_moved = bool(self.lib.ucp_worker_progress(self.worker))
        for endpoint in [each for each in self.endpoints.values() if each.line]:
            endpoint.advance()
        return has_moved

    def listen(self) -> None:
        """Drive progress in a thread whenever there is work, whatever this rank does. May be repeated.

        So a rank that waits in MPI, or multiplies, serves those of other nodes, which UCX does in software over TCP.
        """
        with self.lock:
            if self._listener is None:
                self._listener = Thread(target=self._serve, name="rma_mm ucx", daemon=True)
                self._listener.start()

    def _serve(self) -> None:
        HELPERS.add(get_ident())
        descriptor = C.c_int()
        checked(self.lib.ucp_worker_get_efd(self.worker, C.byref(descriptor)), "events")
        events = select.poll()
        events.register(descriptor.value, select.POLLIN)
        while True:
            begin = time.perf_counter()
            with self.lock:
                for _ in range(BURST):
                    if not self.advance():
                        break
                is_armed = self.lib.ucp_worker_arm(self.worker) == OK
            time.sleep(min(RESTS * (time.perf_counter() - begin), LONGEST_REST))
            if is_armed:
                events.poll(ASLEEP)

    def expose(self, address: int | None, nbytes: int) -> Mapped:
        """Memory at an address, or new memory, for others to reach. Raises WindowError."""
        handle, facts = P(), MemoryFacts(mask=QUERY_ADDRESS | QUERY_LENGTH)
        mask = MAP_LENGTH | (MAP_FLAGS if address is None else MAP_ADDRESS)
        asked = MapParams(mask=mask, address=address, length=nbytes, flags=0 if address else MAP_ALLOCATE)
        with self.lock:
            what = f"UCX cannot {'allocate' if address is None else 'register'} {nbytes} bytes"
            checked(self.lib.ucp_mem_map(self.context, C.byref(asked), C.byref(handle)), what)
            checked(self.lib.ucp_mem_query(handle, C.byref(facts)), what)
            return Mapped(handle, facts.address, self._packed("ucp_rkey_pack", self.context, handle))

    def hide(self, memory: Mapped) -> None:
        """Give memory back, or no longer expose it."""
        with self.lock:
            self.lib.ucp_mem_unmap(self.context, memory.handle)

    def endpoint(self, address: bytes) -> Endpoint:
        """Return the way to the process with this address, made when it is first asked for. Raises WindowError."""
        with self.lock:
            found = self.endpoints.get(address)
            if found is None:
                found = self.endpoints[address] = Endpoint(self, address)
            return found

    def _packed(self, call: str, *arguments: Any) -> bytes:
        """Return the bytes that a call packs, and release its buffer."""
        pointer, length = P(), SIZE()
        checked(getattr(self.lib, call)(*arguments, C.byref(pointer), C.byref(length)), call)
        raw = C.string_at(pointer, length.value)
        if call == "ucp_rkey_pack":
            self.lib.ucp_rkey_buffer_release(pointer)
        else:
            self.lib.ucp_worker_release_address(self.worker, pointer)
        return raw


class Endpoint:
    """The way to one process, which may be this one. Transfers are over when what they return says so."""

    def __init__(self, ucp: Ucp, address: bytes) -> None:
        self.ucp, self.handle = ucp, P()
        self.line: deque[Steps] = deque()
        """Work to be done there under a lock: one after the other, so that none waits for another of this rank."""
        self._lock_key: Any = None
        raw = C.create_string_buffer(address, len(address))
        asked = EndpointParams(mask=EP_ADDRESS, address=C.addressof(raw))
        with quiet(ucp.path):
            status = ucp.lib.ucp_ep_create(ucp.worker, C.byref(asked), C.byref(self.handle))
        if status != OK:
            raise WindowError(f"UCX reaches no other process ({message(status)}); {remedy()}")

    def key(self, packed: bytes) -> Any:
        """Return a key to memory of the process, to be destroyed. Raises WindowError."""
        found = P()
        with self.ucp.lock:
            checked(self.ucp.lib.ucp_ep_rkey_unpack(self.handle, packed, C.byref(found)), "key of memory")
        return found

    def lock_key(self, packed: bytes) -> Any:
        """Return the key to the locks of the process, the same at each call. Raises WindowError."""
        if self._lock_key is None:
            self._lock_key = self.key(packed)
        return self._lock_key

    def advance(self) -> None:
        """Advance the queued transfers as far as possible."""
        while self.line:
            try:
                next(self.line[0])
                return
            except StopIteration:
                self.line.popleft()

    def get(self, key: Any, runs: Runs) -> Done:
        return self._move(self.ucp.lib.ucp_get_nbx, key, runs, is_put=False)

    def put(self, key: Any, runs: Runs) -> Done:
        return self._move(self.ucp.lib.ucp_put_nbx, key, runs, is_put=True)

    def swap(self, address: int, key: Any, value: int, before: Any) -> Done:
        return self._atomic(SWAP, address, key, value, before)

    def add(self, address: int, key: Any, value: int, before: Any) -> Done:
        return self._atomic(ADD, address, key, value, before)

    def _move(self, call: Any, key: Any, runs: Runs, is_put: bool) -> Done:
        lib, endpoint, is_open = self.ucp.lib, self.handle, is_put
        with self.ucp.lock:
            for there, here, size in zip(*(each.tolist() for each in runs), strict=True):
                request = call(endpoint, here, size, there, key, PLAIN)
                if request:
                    self._require(request)
                    lib.ucp_request_free(request)  # it goes on, and is given back when it is over
                    is_open = True
            return self._test(lib.ucp_ep_flush_nbx(endpoint, PLAIN) if is_open else 0)

    def _atomic(self, operation: int, address: int, key: Any, value: int, before: Any) -> Done:
        given = C.c_int64(value)
        asked = RequestParams(mask=WITH_DATATYPE | WITH_REPLY, datatype=EIGHT_BYTES, reply=C.addressof(before))
        with self.ucp.lock:
            call = self.ucp.lib.ucp_atomic_op_nbx
            request = call(self.handle, operation, C.byref(given), 1, address, key, C.byref(asked))
            return self._test(request, given, before)

    def _require(self, request: int) -> None:
        """Raise WindowError for a pointer that is an error."""
        if -LAST_ERROR < request < 0:
            raise WindowError(message(request))

    def _test(self, request: int, *held: Any) -> Done:
        """Return a test of a request; it keeps `held` alive until the request is over."""
        self._require(request)
        lib, left = self.ucp.lib, [request, *held] if request else []

        def done() -> bool:
            if not left:
                return True
            with self.ucp.lock:
                status = lib.ucp_request_check_status(request)
                if status == IN_PROGRESS:
                    lib.ucp_worker_progress(self.ucp.worker)
                    status = lib.ucp_request_check_status(request)
                if status == IN_PROGRESS:
                    return False
                left.clear()
                lib.ucp_request_free(request)
            if status != OK:
                raise WindowError(message(status))
            return True

        return done


@contextmanager
def quiet(path: str) -> Iterator[None]:
    """Silence UCX's output about failures that are reported here. Where UCX_LOG_LEVEL is set, it does."""
    log_from(path, b"fatal")
    try:
        yield
    finally:
        log_from(path, b"warn")


def log_from(path: str, level: bytes) -> None:
    """Set UCX's log level, unless the user has set it."""
    if "UCX_LOG_LEVEL" not in os.environ:
        with suppress(OSError, AttributeError):
            C.CDLL(beside(path, "ucs")).ucs_global_opts_set_value(b"LOG_LEVEL", level)


def message(status: int) -> str:
    lib: Any = loaded()[1]
    return str(lib.ucs_status_string(C.c_byte(status)).decode())


def checked(status: int, what: str) -> None:
    """Raise WindowError unless a call went well."""
    if status != OK:
        raise WindowError(f"{what}: {message(status)}")


def require(status: int, what: str) -> None:
    """Raise AbsentError unless a call that all rests on went well."""
    if status != OK:
        raise AbsentError(f"{what}: {message(status)}; {remedy()}")


def remedy() -> str:
    """Return advice for where UCX finds no way."""
    tls = os.environ.get("UCX_TLS")
    if tls:
        return f"UCX_TLS is {tls}: unset it, or name transports that are there, as sm,tcp,self"
    return "UCX_LOG_LEVEL=info makes it say more; other windows do without it"


@cache
def start() -> Ucp:
    """Return the library with its context and worker, the same at each call. Raises AbsentError."""
    return Ucp()


@cache
def loaded() -> tuple[str, Any, str]:
    """Path, library and version. Raises AbsentError if there is none that serves."""
    there = in_process()
    if len(there) > 1:
        raise AbsentError(
            f"two libraries of UCX are in this process, {' and '.join(there)}; two would not know of each other's "
            f"memory hooks: install one, or let LD_LIBRARY_PATH name one"
        )
    ucx_py()  # which loads its libucp
    path = next(iter(in_process() or candidates()), None)
    if path is None:
        raise AbsentError("no libucp here; pip install mpich, or libucx-cu12 (needs no GPU), or apt install libucx0")
    try:
        lib: Any = C.CDLL(path)
        for name, (result, *arguments) in CALLS.items():
            call = getattr(lib, name)
            call.restype, call.argtypes = result, arguments
        lib.ucs_status_string = C.CDLL(beside(path, "ucs")).ucs_status_string
        lib.ucs_status_string.restype = C.c_char_p
    except (OSError, AttributeError) as error:
        raise AbsentError(f"{path} does not serve ({error}); UCX {OLDEST[0]}.{OLDEST[1]} or later is needed") from None
    numbers = [C.c_uint() for _ in range(3)]
    lib.ucp_get_version(*map(C.byref, numbers))
    version = tuple(number.value for number in numbers)
    if not OLDEST <= version < (2,):
        said = ".".join(map(str, version))
        raise AbsentError(f"{path} is UCX {said}; one from {OLDEST[0]}.{OLDEST[1]} to 1.x serves")
    return path, lib, ".".join(map(str, version))


def in_process() -> list[str]:
    """Return the libraries of UCX that this process has loaded, each once."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libucp" in line}
    except OSError:
        return []
    return sorted(path for path in paths if os.path.basename(path).startswith("libucp"))


def candidates() -> list[str]:
    """Return paths of libraries of UCX in the order in which they are taken: MPI's wheel, the system's, libucx's."""
    folders = [sys.prefix, *site.getsitepackages()]
    mpi = [path for each in folders for path in glob.glob(f"{each}/lib/*mpi*/libucp.so*")]
    wheel = [path for each in folders for path in glob.glob(f"{each}/libucx/lib/libucp.so*")]
    return [*sorted(mpi), *filter(None, [ctypes.util.find_library("ucp")]), *sorted(wheel)]


def beside(path: str, name: str) -> str:
    return os.path.join(os.path.dirname(path), os.path.basename(path).replace("libucp", f"lib{name}"))


@cache
def ucx_py() -> Any:
    """The module of ucx-py that knows handles; None if it is not installed, or its libucp does not go with MPI's."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from ucp._libs import ucx_api
    except (ImportError, OSError):
        return None
    return ucx_api


def shared_with_ucx_py() -> tuple[Any, Any] | None:
    """Return a context and a worker of ucx-py, whose handles are used; None if there is none."""
    ucx_api = ucx_py()
    if ucx_api is None:
        return None
    context = ucx_api.UCXContext(feature_flags=(ucx_api.Feature.RMA, ucx_api.Feature.AMO64, ucx_api.Feature.WAKEUP))
    return context, ucx_api.UCXWorker(context)
