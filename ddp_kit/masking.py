"""Masks secrets in output as `****`. Secrets are recognised by name, by position in a URL, or by value.

Doubtful cases are masked: masking a harmless word does less damage than printing a password.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

MASK = "****"

_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
_SHORTEST = 6
"""Minimum length of a secret value to be replaced in other text, where shorter values may occur by chance."""

# Words that mark a secret anywhere in a name.
_ALWAYS = re.compile("SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|AUTHORIZATION|SIGNATURE|WEBHOOK|CREDS", re.IGNORECASE)
# Words that mark a secret if they are a whole word of a name, or (first group) the end of a word, as in `authtoken`;
# but not in `tokenizer`, `keyboard` or `author`.
_WORD = re.compile(r"\w*(TOKEN|KEY|AUTH|PASS)|PRIVATE|DSN|PAT|PWD|JWT|SIG|BEARER", re.IGNORECASE)
_PLURAL = re.compile(r"\w*(TOKEN|KEY)S", re.IGNORECASE)
_WORDS_OF_A_NAME = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # HF_TOKEN, hf-token, hfToken, HFToken
_NUMBER = re.compile(r"[+-]?[\d._]+(e[+-]?\d+)?[kmb]?|true|false", re.IGNORECASE)
_FOLDERS = ("PWD", "OLDPWD")

_NAME = re.compile(
    r"""(?P<name>(?<![\w-])-{0,2}[A-Za-z_][\w.-]{0,255})"""
    r"""(?P<between>[\\"'\])]*[ \t]*(?:=>|:=|[=:])[ \t]*|["'],[ ]|[ \t]+)"""
)
# A word of a command line, quoted or not; an unclosed quotation extends to the end of the line.
_QUOTED = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
_VALUE = re.compile(
    r"(?:(?:Bearer|Basic|Token)[ ]+)?"
    rf"""(?:{_QUOTED}(?=[,;)}}\]]+(?:\s|$))|(?:{_QUOTED}|\\.|[^\s"'\\]|["'\\][^\n]*)+)""",
    re.DOTALL,
)
_BEARER = re.compile(r"\b(Bearer[ ]+)\S+", re.IGNORECASE)
# A URL's user and password, up to the last @; the password may contain a slash, but a port and a path do not match.
_URL = re.compile(r"(?<=://)(?:[^\s/:@]*:(?!\d{0,5}/)\S{0,4096}|[^\s/?#]*)@")
_ONE_NAME = re.compile(r"[+-]*[\w.-]+")
# A flag without a value, such as `--use-auth-token`, is followed by the next flag, which is not a secret.
_FLAG = re.compile(r"-[A-Za-z]|--[a-z][\w-]*(=.*)?", re.DOTALL)


def masked_env(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of the variables in which secret values, and secrets inside other values, are replaced by `****`."""
    return {name: MASK if value and _secret(name, value) else masked(value, env) for name, value in env.items()}


def masked(text: str, env: Mapping[str, str] = _NO_VARIABLES) -> str:
    """A copy of the text in which all secrets are replaced by `****`.

    The text may be a message or a command line. The values of secret variables in `env` are recognised anywhere in it.
    """
    values = {value for name, value in env.items() if len(value) >= _SHORTEST and _secret(name, value)}
    values |= {repr(value)[1:-1] for value in values}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, MASK)
    text = _BEARER.sub(rf"\1{MASK}", _URL.sub(f"{MASK}@", text))
    parts: list[str] = []
    position = 0
    while pair := _NAME.search(text, position):
        name, between = pair.group("name", "between")
        joined = name.startswith("-") or between.strip(" \t,'\"")  # the word is the value of a flag, variable or key
        word = None
        if joined and _secret(name, ""):
            word = _VALUE.match(text, pair.end())
        if word and _secret(name, word[0]) and not (between.isspace() and _FLAG.fullmatch(word[0])):
            parts.append(text[position : word.start()] + MASK)
            position = word.end()
        else:  # continue right after the name: the next word may be a name as well
            parts.append(text[position : pair.end("name")])
            position = pair.end("name")
    return "".join([*parts, text[position:]])


def masked_words(words: Sequence[str], env: Mapping[str, str] = _NO_VARIABLES) -> list[str]:
    """The words of a command line with all secrets masked, such as the word after `--hf-token`."""
    result: list[str] = []
    before = ""
    for word in words:
        name, _, value = word.partition("=")
        if before.startswith("-") and "=" not in before and _secret(before, word) and not _FLAG.fullmatch(word):
            result.append(MASK)
        elif value and _ONE_NAME.fullmatch(name) and _secret(name, value):
            result.append(f"{name}={MASK}")
        else:
            result.append(masked(word, env))
        before = word
    return result


def _secret(name: str, value: str) -> bool:
    """Whether `value` is a secret, judged by the name of its variable, flag or key.

    A number, as in `max_tokens=512`, is a secret only if the last word of the name marks a secret.
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
    has_secret_word = any(_WORD.fullmatch(word) or _PLURAL.fullmatch(word) for word in words)
    return has_secret_word and not _NUMBER.fullmatch(value)
