"""The wire contract: every message between router, decode worker and prefill worker.

A frame is one message in msgpack. Durations travel, never clock readings: hosts share no clock.

    router  -> decode    Generate, Claim, Stop, Abort, Ack; to prefill, too: ForgetPrefixes
    decode  -> router    Chunks, Claimed, Refused
    decode  -> prefill   Prefill, Renew, Release
    prefill -> decode    KVReady, PrefillRefused, RenewAck
    leader <-> rank      RankMessage, within a worker of several ranks
    everyone             Ping, Pong (worker.wire sends and answers them)

A process is a `Member`: a name that outlives restarts and an `incarnation` that does not. Peers are
addressed by `PeerId` = "name/incarnation", so a message can never reach a successor. A request is
(req_id, dispatch): `dispatch` counts how often the router has sent it. A transfer is an `Xfer`;
messages of older ones are dropped.
"""

from enum import StrEnum
from typing import Literal

import msgspec

PeerId = str
MAX_LOGPROBS = 20  # alternatives reported for one token
GRAMMAR_PARAM = "grammar"  # `Error.param`: Sampling.grammar is at fault; routers name their field
MAX_STOP_IDS = 16  # stop token ids of one request, EOS ids of the model included
Role = Literal["prefill", "decode", "router", "controller"]


class FinishReason(StrEnum):
    """Why a request ended. `ERROR` comes with an `Error` in the same chunk."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of everything that crosses the wire."""


class OfRequest(Message, frozen=True):
    """Base of messages about one dispatch of a request."""

    req_id: str
    dispatch: int


class Error(Message, frozen=True):
    """A typed error; `code` is `worker.errors.KvlaneError.code` of the error."""

    code: str
    message: str
    param: str | None = None  # path of the field that is wrong, if it is the user's mistake


class Member(Message, frozen=True):
    """One live process of the cluster, as the controller announces it to all."""

    name: str
    role: Role
    incarnation: str
    address: str  # tcp://host:port of its ROUTER socket
    metrics_address: str = ""  # host:port where it serves /metrics
    model: str = ""
    max_model_len: int = 0  # prompt + output tokens of one request; 0 = not a worker
    layout_hash: str = ""  # of worker.cache.layout.Identity; peers with others never transfer
    transport: str = ""  # name and kind, e.g. "mooncake/tcp"
    endpoints: tuple[bytes, ...] = ()  # by rank: worker.transfer.base.Endpoint
    node: str = ""
    pid: int = 0
    digest: str = ""  # of configuration and weights, for people: layout_hash covers it
    simulated_accept_len: float = 0.0  # tokens of a step that count; above 0 its answers are junk
    drafter: str = ""  # `SpecConfig.drafter`; "": nothing proposes drafts
    wire_key: str = ""  # public key of its Wire (worker.keyring); "": its frames are plain

    @property
    def peer(self) -> PeerId:
        """The name under which this very incarnation is addressed."""
        return f"{self.name}/{self.incarnation}"


class Card(msgspec.Struct, frozen=True):
    """The GPU of a worker, or of its first rank; a figure that its driver has not is 0."""

    used_bytes: int  # by all processes
    num_bytes: int
    watts: float
    max_watts: float
    mhz: int  # of its multiprocessors


class WorkerStats(Message, frozen=True):
    """A worker's figures, in every Pong; counts are of this moment."""

    num_running: int = 0
    num_waiting: int = 0
    max_num_reqs: int = 0
    num_free_pages: int = 0  # free or evictable, less reserved ones
    num_pages: int = 0
    num_queued_tokens: int = 0  # prompt tokens admitted and not yet computed
    prefill_s_per_token: float = 0.0  # moving average of its own prefill steps; 0 = none yet
    draining: bool = False
    num_steps: int = 0  # settled since its start
    has_work: bool = False  # a step can be launched, or is under way: num_steps has to grow
    page_size: int = 0  # tokens
    snapshot_grid: int = 0  # states of prompts are kept at multiples of so many tokens; 0: never
    num_windows: int = 0  # that have verified drafts since its start
    drafted: tuple[int, ...] = ()  # drafts by place in a window; (): it verifies nothing
    accepted: tuple[int, ...] = ()
    tokens_per_row: float = 0.0  # moving average, of a row in a decode step; 0: none yet
    card: Card | None = None
    turns: tuple[tuple[int, str], ...] = ()  # that came last, of sessions: ascending, `session`


class Sampling(Message, frozen=True):
    """How tokens of one request are drawn; all limits are checked by the router.

    The second block changes logits before temperature and filters, in this order: bias, repetition
    penalty (over prompt and output), frequency and presence penalty (over output), grammar.
    """

    max_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # in [0, 1)
    seed: int = 0  # [0, 2**63); always set by the router, so that a replay draws the same
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1  # likeliest alternatives beside a token's own logprob; -1 = no logprobs
    grammar: str = ""  # llguidance grammar that the output must follow; "" = free
    return_trace: bool = False  # chunks of decode steps come with their windows
    prompt_logprobs: int = -1  # the same of the prompt, all of it computed where its output is

    @property
    def changes_logits(self) -> bool:
        """Whether a row needs counts or biases on the device."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1)
        return any(penalties) or bool(self.logit_bias)

    @property
    def is_plain(self) -> bool:
        """Whether a draw needs the text, these numbers and nothing that only decode has."""
        return not (self.changes_logits or self.grammar or self.logprobs >= 0)


class Candidate(Message, frozen=True):
    """A prefill worker that the router proposes, as the router knew it at dispatch."""

    peer: PeerId
    num_queued_tokens: int = 0  # that it computes before the prompt
    prefill_s_per_token: float = 0.0
    num_cached_tokens: int = 0  # the router's own estimate of that worker's prefix hit


class Generate(OfRequest, frozen=True):
    """Router to decode: take this request. tokens = prompt + whatever was emitted before."""

    tokens: tuple[int, ...]
    num_prompt_tokens: int
    sampling: Sampling
    timeout_s: float
    candidates: tuple[Candidate, ...] = ()
    # req_id of the first choice, if this is another: it waits for its end or the prompt's pages
    after: str = ""
    trace: str = ""  # the span that decode's are below: `Trace.carried`; "" = not traced
    key: str = ""  # by which it can be claimed, also after its router is gone; "" = it cannot
    salt: str = ""  # requests with another one share no KV with it; those without any do
    leads: bool = False  # further choices follow, which go on from the state of its prompt
    session: str = ""  # "owner/name", digests, of whose turn it is: steers eviction alone
    keep_s: float = 0.0  # of a session: from its end, for which its pages are worth keeping
    grammar_age: int = 0  # above 0: sampling.grammar is not written out (`worker.config.said`)


class Claim(OfRequest, frozen=True):
    """Router to decode: a client has come back for the request of this key.

    Who has it answers `Claimed`, sends all its tokens again, and goes on with it by this id.
    """

    key: str
    timeout_s: float


class Claimed(OfRequest, frozen=True):
    """Decode to router: whether the request of a Claim is here."""

    found: bool


class Stop(OfRequest, frozen=True):
    """Router to decode: a stop string matched; nothing from `at_position` on counts or follows."""

    at_position: int


class Abort(OfRequest, frozen=True):
    """Router to decode: the client is gone; send no final chunk."""

    keep: bool = False  # if it has a key: the client may come back for it


class ForgetPrefixes(Message, frozen=True):
    """Router to workers: drop pages that no request uses from the prefix tree."""


class Ack(OfRequest, frozen=True):
    """Router to decode: the final chunk of (req_id, dispatch) arrived; stop sending it."""


class Refused(OfRequest, frozen=True):
    """Decode to router: not admitted (no room, draining, prompt too long); try elsewhere."""

    error: Error
    retry_after_s: float = 1.0


class TokenLogprob(Message, frozen=True):
    """The model's logprobs at one token, before any change of its logits."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob) of the likeliest, best first


class Stages(Message, frozen=True):
    """Where the time from a Generate's arrival to its first token went, in seconds.

    They follow one another and add up to that time; a prefill's are by its own clock. Those after
    the prefill are 0 if that drew the first token, and come with the second from elsewhere. Pulls
    begin while the prefill goes on: theirs are times beside these.
    """

    prefill_queue_s: float  # asking for the prefill, and waiting for its first step
    prefill_s: float  # from its first step until all KV is final and, if drawn there, the token
    transfer_s: float  # from the last announcement until all pages had arrived
    decode_queue_s: float  # from then on, waiting for a row
    first_step_s: float  # from its row until the first token was on the host
    prefilled_by: str  # PeerId; "" = all but the last token was in a prefix tree
    late: bool = False  # the second token's: those after `prefill` came after the first
    pull_s: float = 0.0  # in which a pull of its KV ran
    pull_span_s: float = 0.0  # from the begin of its first pull until all KV was here
    pulled_bytes: int = 0  # by these pulls


class Window(Message, frozen=True):
    """One decode step of one request: a line of its accept trace."""

    position: int  # of its first token, whose KV the step stores: so many tokens had theirs before
    width: int  # tokens that it computed
    drafts: tuple[int, ...]  # the width - 1 ids that it verified; -1: there was none
    num_accepted: int  # of these; the step yielded one token more


class TokenChunk(OfRequest, frozen=True):
    """Tokens of one request; `position` is the index of tokens[0] in prompt + output.

    The final chunk has a finish_reason and is sent again until it is acknowledged. One with neither
    tokens nor a reason says that the request gets a row.
    """

    position: int
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: Error | None = None
    num_cached_tokens: int = 0  # prompt tokens found in a prefix tree, decode's or prefill's
    logprobs: tuple[TokenLogprob, ...] = ()  # one a token, if they were asked for
    stages: Stages | None = None  # with the first token drawn for this dispatch
    window: Window | None = None  # if it was asked for, of the decode step that drew the tokens
    # If asked for: the next ones of the prompt's, in chunks without tokens before the first token.
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class Chunks(Message, frozen=True):
    """Decode to router: one engine step's tokens for that router, or early first tokens."""

    chunks: tuple[TokenChunk, ...]


class Xfer(Message, frozen=True):
    """Identity of one attempt to bring a prompt's KV from one incarnation to another."""

    xfer_id: str
    attempt: int
    decode: str  # incarnation
    prefill: str  # incarnation


class Prefill(Message, frozen=True):
    """Decode to prefill: make KV of tokens[:-1]; announce the pages beyond `num_matched`.

    With `sampling`: KV of all tokens, and draw the one that follows them.
    """

    xfer: Xfer
    tokens: tuple[int, ...]
    num_matched: int  # tokens whose KV decode holds or will not read; a multiple of page_size
    link_bytes_per_s: float = 0.0  # as decode has measured its link to this worker; 0 = not known
    sampling: Sampling | None = None  # a plain one (`Sampling.is_plain`)
    num_prompt_tokens: int = 0  # with `sampling`: of `tokens`; the others are output
    trace: str = ""  # the span that prefill's are below, as in Generate
    salt: str = ""  # as in Generate
    key: bytes = b""  # of this attempt, for `KVReady.seal`


class PrefillRefused(Message, frozen=True):
    """Prefill to decode: not admitted; decode asks its next candidate, or prefills by itself."""

    xfer: Xfer
    error: Error


class KVReady(Message, frozen=True):
    """Prefill to decode: these pages are final and may be pulled while the lease lives.

    pages[i] holds page first_page + i of the prompt. `last` says that nothing follows.
    Every renewal repeats all announcements, and decode takes new ones. Without pages it answers a
    Prefill of which nothing is cached, or brings the token that Prefill.sampling asked for.
    """

    xfer: Xfer
    first_page: int
    pages: tuple[int, ...]
    first_group: int
    num_groups: int
    last: bool
    num_cached_tokens: int = 0  # of the prompt, found in prefill's prefix tree
    prefill_s: float = 0.0  # with `last`: from the prompt's first step until this
    token: int | None = None  # with `last`: the one that Prefill.sampling asked for
    state_slot: int = 0  # with `last`, where layers are recurrent: the state after all those tokens
    seal: bytes = b""  # over all of it, by `Prefill.key`: worker.transfer.seal


class Renew(Message, frozen=True):
    """Decode to prefill: these transfers still matter. Window arithmetic: worker.transfer.lease."""

    seq: int
    xfers: tuple[Xfer, ...]


class RenewAck(Message, frozen=True):
    """Prefill to decode: the transfers of `Renew(seq)` whose leases were prolonged."""

    seq: int
    xfers: tuple[Xfer, ...]


class Release(Message, frozen=True):
    """Decode to prefill: the transfer is over or not needed; leases also end without it."""

    xfer: Xfer


class Ping(Message, frozen=True):
    """Sent every interval on every link by the side that connected."""

    sender: PeerId
    granted: int = 0  # units that its peer may send on this link, in all: worker.keyring


class Pong(Message, frozen=True):
    """Answer to Ping, as long as the answering process's own loop makes progress."""

    sender: PeerId
    stats: WorkerStats | None = None
    granted: int = 0  # as in Ping


class Bye(Message, frozen=True):
    """Closes the link of the side that connected; nothing follows on it."""


class RankMessage(Message, frozen=True, tag="Between"):
    """Between the leader and a rank of one worker; `worker.rank` reads its body."""

    body: bytes


class Lost(Message, frozen=True):
    """Never on the wire: `worker.wire` delivers it when a link is over."""

    reason: str
    is_silent: bool = False  # the peer answers no pings; else it may live, and be connected anew


AnyMessage = (
    Generate | Claim | Claimed | Stop | Abort | ForgetPrefixes | Ack | Refused | Chunks
    | Prefill | PrefillRefused | KVReady | Renew | RenewAck | Release
    | Ping | Pong | Bye | RankMessage
)  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(AnyMessage).decode
