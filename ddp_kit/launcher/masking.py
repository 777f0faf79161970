"""Secrets are not printed: what looks like one by its name, its place in a URL, or its value becomes `****`.

Where it is not clear it is masked: a harmless word too many costs less than a password in a log.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

MASK = "****"

_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
_SHORTEST = 6
"""Shorter values of secret variables are not looked for in other text: that would shred it."""

# Anywhere in a name.
_ALWAYS = re.compile("SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|AUTHORIZATION|SIGNATURE|WEBHOOK|CREDS", re.IGNORECASE)
# One of a name's words, or the end of one, as in `authtoken`; but not `tokenizer`, `keyboard`, `author`.
_WORD = re.compile(r"\w*(TOKEN|KEY|AUTH|PASS)|PRIVATE|DSN|PAT|PWD|JWT|SIG|BEARER", re.IGNORECASE)
_PLURAL = re.compile(r"\w*(TOKEN|KEY)S", re.IGNORECASE)
_WORDS_OF_A_NAME = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # HF_TOKEN, hf-token, hfToken, HFToken
_NUMBER = re.compile(r"[+-]?[\d._]+(e[+-]?\d+)?[kmb]?|true|false", re.IGNORECASE)
_FOLDERS = ("PWD", "OLDPWD")

_NAME = re.compile(
    r"""(?P<name>(?<![\w-])-{0,2}[A-Za-z_][\w.-]{0,255})"""
    r"""(?P<between>[\\"'\])]*[ \t]*(?:=>|:=|[=:])[ \t]*|["'],[ ]|[ \t]+)"""
)
# A word of a command line, quoted or not; what a quotation mark opens and nothing closes goes on to the line's end.
_QUOTED = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
_VALUE = re.compile(
    r"(?:(?:Bearer|Basic|Token)[ ]+)?"
    rf"""(?:{_QUOTED}(?=[,;)}}\]]+(?:\s|$))|(?:{_QUOTED}|\\.|[^\s"'\\]|["'\\][^\n]*)+)""",
    re.DOTALL,
)
_BEARER = re.compile(r"\b(Bearer[ ]+)\S+", re.IGNORECASE)
# Up to the last @ where a password follows, which may hold a slash; a port and a path are none.
_URL = re.compile(r"(?<=://)(?:[^\s/:@]*:(?!\d{0,5}/)\S{0,4096}|[^\s/?#]*)@")
_ONE_NAME = re.compile(r"[+-]*[\w.-]+")
# Behind `--use-auth-token` alone follows the next flag.
_FLAG = re.compile(r"-[A-Za-z]|--[a-z][\w-]*(=.*)?", re.DOTALL)


def masked_env(env: Mapping[str, str]) -> dict[str, str]:
    """The variables, the values of secret ones replaced, and what is secret in the others."""
    return {name: MASK if value and _secret(name, value) else masked(value, env) for name, value in env.items()}


def masked(text: str, env: Mapping[str, str] = _NO_VARIABLES) -> str:
    """Free text, such as a message or a command line, without the secrets in it and without those of `env`."""
    values = {value for name, value in env.items() if len(value) >= _SHORTEST and _secret(name, value)}
    values |= {repr(value)[1:-1] for value in values}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, MASK)
    text = _BEARER.sub(rf"\1{MASK}", _URL.sub(f"{MASK}@", text))
    found: list[str] = []
    position = 0
    while pair := _NAME.search(text, position):
        name, between = pair["name"], pair["between"]
        word = _VALUE.match(text, pair.end()) if _names_what_follows(name, between) else None
        if word and _secret(name, word[0]) and not (between.isspace() and _FLAG.fullmatch(word[0])):
            found.append(text[position : word.start()] + MASK)
            position = word.end()
        else:  # only the name is passed over: what follows may itself be a name
            found.append(text[position : pair.end("name")])
            position = pair.end("name")
    return "".join([*found, text[position:]])


def masked_words(words: Sequence[str], env: Mapping[str, str] = _NO_VARIABLES) -> list[str]:
    """The words of a command line, each masked by itself, and what follows a flag such as `--hf-token`."""
    result: list[str] = []
    before = ""
    for word in words:
        name, equals, value = word.partition("=")
        if before.startswith("-") and "=" not in before and _secret(before, word) and not _FLAG.fullmatch(word):
            result.append(MASK)
        elif equals and _ONE_NAME.fullmatch(name) and _secret(name, value):
            result.append(f"{name}={MASK}" if value else word)
        else:
            result.append(masked(word, env))
        before = word
    return result


def _names_what_follows(name: str, between: str) -> bool:
    """Whether the next word is the secret of this name: behind a flag always, also in a list of words."""
    joined = name.startswith("-") or bool(between.strip(" \t,'\""))
    return joined and _secret(name, "")


def _secret(name: str, value: str) -> bool:
    """Whether a variable, flag or key of this name holds a secret.

    A number does not where the name tells of something else in the end: `max_tokens`, `--num-key-value-heads`.
    """
    if name.lstrip("-") in _FOLDERS:
        return False
    if _ALWAYS.search(name):
        return True
    words = _WORDS_OF_A_NAME.findall(name)
    if not words or words[-1] in ("Error", "Exception"):
        return False
    if _WORD.fullmatch(words[-1]):
        return True
    telling = any(_WORD.fullmatch(word) or _PLURAL.fullmatch(word) for word in words)
    return telling and not _NUMBER.fullmatch(value)
