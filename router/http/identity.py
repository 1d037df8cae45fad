"""Whose turn a request is: the session that its body or its headers name.

The first that is there counts: the body's `session_id`; HEADERS; Claude Code's, of which an agent's
id names the child; Codex' `session-id`; `prompt_cache_key`; `session_id` inside Anthropic's
`metadata.user_id`, never all of that text; the session of `previous_response_id`. A session is its
API key's alone. It steers where a turn goes and what is evicted last; what may be found in a cache
is for the salt alone to say.
"""

from hashlib import blake2b

from router.http.source import Headers
from router.openai.body import Prepared

HEADERS = (b"x-session-id", b"x-dynamo-session-id", b"x-session-affinity")
CLAUDE, CLAUDE_AGENT, CODEX = b"x-claude-code-session-id", b"x-claude-code-agent-id", b"session-id"
NAMES = frozenset({*HEADERS, CLAUDE, CLAUDE_AGENT, CODEX})


def identify(prepared: Prepared, headers: Headers, client: str, unique_id: str) -> None:
    """Tell the choices of a request whose turn it is.

    client: the name of its API key. unique_id: of the request, names a session that begins with it.
    """
    named, text = prepared.named, prepared.named.session_id
    sent = {name: value.decode("latin-1") for name, value in headers if name in NAMES}
    if sent and not text:
        told = [sent.get(name, "") for name in HEADERS]
        if claude := sent.get(CLAUDE):
            told.append(f"{claude}/{sent.get(CLAUDE_AGENT, '')}")
        text = next(filter(None, (*told, sent.get(CODEX))), "")
    session, text = named.previous, text or named.cache_key
    if not (text or session) and (named.begins or named.ttl_s is not None):
        text = unique_id
    if text:
        session = f"{_digest(client)}/{_digest(text)}"
    for req in prepared.reqs:
        req.session, req.keep_s = session, named.ttl_s


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
