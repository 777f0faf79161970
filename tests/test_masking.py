"""Secrets: however one is written, it is not printed; and what is none stays readable."""

import json
import shlex
import sys
from subprocess import PIPE

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ddp_kit.launcher.rendezvous import holder
from ddp_kit.masking import MASK, masked, masked_env, masked_words
from tests.support.launching import started

SECRET_NAMES = [
    "HF_TOKEN", "hfToken", "HFToken", "hf-token", "apikey", "API_KEY", "api.key", "AWS_SECRET_ACCESS_KEY",
    "AWS_ACCESS_KEY_ID", "WANDB_API_KEY", "API_KEY_2", "API_KEYS", "KEY", "GITHUB_PAT", "NGROK_AUTHTOKEN", "db_passwd",
    "PGPASSWORD", "password", "SSHPASS", "MYSQL_PWD", "SSH_PASSPHRASE", "GOOGLE_CREDENTIALS", "session_cookie",
    "BASIC_AUTH", "Authorization", "SENTRY_DSN", "PRIVATE_KEY", "clientSecret", "SLACK_WEBHOOK_URL", "X-Amz-Signature",
]  # fmt: skip
HARMLESS_NAMES = [
    "PWD", "OLDPWD", "KEYBOARD_LAYOUT", "tokenizer", "TOKENIZERS_PARALLELISM", "PATH", "PYTHONPATH", "author",
    "keyword", "patience", "keep_alive", "signals", "monkeypatch",
]  # fmt: skip
names = st.sampled_from(SECRET_NAMES)
# Longer than what stands around it by chance, no number, and no word that begins with a dash as the next flag does.
secrets = (
    st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=8, max_size=30)
    .filter(lambda text: not any(mark.isspace() for mark in text))
    .map(lambda text: f"s{text}")
)
bare = secrets.filter(lambda text: not set(text) & set("\"'\\"))


def survives(secret: str, shown: str, around: str) -> bool:
    """Whether half of a secret can be read in `shown`. `around`: the text without the secret, which may contain it."""
    half = len(secret) // 2
    return any(part in shown and part not in around for part in (secret[:half], secret[-half:]))


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_masked_hides_the_value_of_a_secret_name(name: str) -> None:
    assert masked_env({name: "abc"}) == {name: MASK}
    assert masked_words([f"--{name}", "abc", "x"]) == [f"--{name}", MASK, "x"]
    assert masked(f"run {name}=abc x") == f"run {name}={MASK} x"


@pytest.mark.parametrize("name", HARMLESS_NAMES)
def test_masked_keeps_the_value_of_a_name_that_only_resembles_a_secret(name: str) -> None:
    assert masked_env({name: "abc"}) == {name: "abc"}
    assert masked_words([f"--{name}", "abc", f"{name}=abc"]) == [f"--{name}", "abc", f"{name}=abc"]
    assert masked(f"{name}=abc --{name} abc {name}: abc") == f"{name}=abc --{name} abc {name}: abc"


def test_masked_keeps_numbers_of_tokens_and_keys() -> None:
    line = "train.py --tokens-per-batch 4096 --num-keys=8 max_tokens=1e9 --key-dim 64 --num-key-value-heads 2"
    assert masked(line) == line
    assert masked_words(line.split()) == line.split()
    assert masked("--password 123456 --api-key=123456") == f"--password {MASK} --api-key={MASK}"


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'input_ids'",
        "--use-auth-token --lr 0.1",
        "git+https://github.com/a/b@v1 http://host:80/x@v",
        "there is no script 'tain.py' in /home/me",
        "rank 1 failed first: exit code 7 (local rank 1, pid 12)",
    ],
)
def test_masked_keeps_text_without_secrets(text: str) -> None:
    assert masked(text) == text
    assert masked_words(text.split()) == text.split()


def test_masked_hides_a_secret_before_an_equals_sign() -> None:
    assert masked_words(['{"password":"abc","a":"b=c"}', "https://me:abc@host?token=abc"]) == [
        f'{{"password":{MASK}',
        f"https://{MASK}@host?token={MASK}",
    ]


def test_masked_keeps_the_text_around_a_secret() -> None:
    assert masked('{"password": "abc", "lr": 1}') == f'{{"password": {MASK}, "lr": 1}}'
    assert masked("postgres://me:abc@host:5432/db x") == f"postgres://{MASK}@host:5432/db x"
    assert masked("--lr 0.1 --token 'a b' train.py") == f"--lr 0.1 --token {MASK} train.py"


@example("db_passwd", "s0000pass", "{}={}")
@given(names, bare, st.sampled_from(["{}={}", "--{} {}", "--{}={}", "-{} {}", "x {}: {} y", "a=1,{}={}", "?{}={}"]))
def test_masked_hides_secrets_in_free_text(name: str, secret: str, form: str) -> None:
    assert not survives(secret, masked(form.format(name, secret)), form.format(name, ""))


def quoted(name: str, secret: str) -> list[tuple[str, str]]:
    """Texts with a secret, each with the form that the secret has in it."""
    in_json, in_python = json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1]
    return [
        (secret, shlex.join(["train.py", f"--{name}", secret, "x"])),
        (secret, shlex.join(["train.py", f"--{name}={secret} and more"])),
        (secret, f'--{name}="{secret} and a quotation that does not end'),
        (secret, f"-H '{name}: Bearer {secret}'"),
        (in_json, json.dumps({"lr": 1, name: secret, "x": [1]}, ensure_ascii=False)),
        (in_python, str({name: secret, "x": 1})),
        (in_python, f"no login with {['train.py', f'--{name}', secret, '--x']}"),
    ]


@example("Authorization", "s0000tion")
@given(names, secrets)
def test_masked_hides_quoted_secrets(name: str, secret: str) -> None:
    for (form, text), (_, around) in zip(quoted(name, secret), quoted(name, ""), strict=True):
        assert not survives(form, masked(text), around), text


@given(st.text("ab:", max_size=3), secrets, st.sampled_from(["{}", "--data={}", "see '{}'", "DATA={} x"]))
def test_masked_hides_passwords_in_urls(user: str, secret: str, form: str) -> None:
    assume(not secret.split("/")[0].isdecimal())  # a host's port
    url, around = f"postgres://{user}:{secret}@host/db", form.format(f"postgres://{user}:@host/db")
    assert not survives(secret, masked(form.format(url)), around)
    assert not any(survives(secret, word, around) for word in masked_words([form.format(url), url]))
    assert not survives(secret, masked_env({"DATABASE": form.format(url)})["DATABASE"], around)
    assert "postgres://" in masked(url)
    assert masked(url).endswith("@host/db")


@given(names, secrets, st.text(max_size=10), st.text(max_size=10))
def test_masked_hides_values_of_secret_variables_anywhere(name: str, secret: str, before: str, after: str) -> None:
    env = {name: secret, "OTHER": f"{before}{secret}{after}"}
    assume(secret not in before + after)
    for text in (f"{before}{secret}{after}", f"{before}{secret!r}{after}"):
        assert secret not in masked(text, env)
        assert repr(secret)[1:-1] not in masked(text, env)
    assert secret not in masked_env(env)["OTHER"]
    assert secret not in "".join(masked_words([before, secret, after], env)).replace(before + after, "")


@given(names, secrets)
def test_masked_words_hides_secrets_in_the_words_of_a_command(name: str, secret: str) -> None:
    for words in ([f"--{name}", secret], [f"--{name}={secret}"], [f"{name}={secret}"], [f"+a.{name}={secret} b"]):
        assert not any(survives(secret, word, name) for word in masked_words(["train.py", *words, "x"]))


@given(st.text())
def test_masked_twice_equals_masked_once(text: str) -> None:
    assert masked(masked(text)) == masked(text)


def test_process_at_a_port_is_named_without_its_secrets() -> None:
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    words = ("--hf-token", "hf_1234567", "http://me:pass5678@h")
    with started(sys.executable, "-c", code, *words, stdin=PIPE) as process:
        assert process.stdout is not None
        said = holder(int(process.stdout.readline()))
        process.communicate()
    assert str(process.pid) in said
    assert "--hf-token ****" in said
    assert "hf_1234567" not in said
    assert "pass5678" not in said
