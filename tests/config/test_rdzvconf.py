"""``--rdzv-conf``: keys, other spellings of keys, values, and passwords that are never shown."""

from __future__ import annotations

import pytest

from elaunch.config import rdzvconf
from tests.config.resolving import Job


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        (" timeout=1", {"timeout": "1"}),
        ("join_timeout=900, is_host = t", {"join_timeout": "900", "is_host": "t"}),
        ("last_call_timeout=30", {"settle": "30"}),
        ("settle=0,debounce=0", {"settle": "0", "debounce": "0"}),
        ("heartbeat=4", {"heartbeat_timeout": "4"}),
        (
            "ssl_cert=a,ssl_cert_key=b,ca_cert=c",
            {"cert": "a", "key": "b", "cacert": "c"},
        ),
        ("timeout=1,timeout=2", {"timeout": "2"}),
        ("store_type=tcp,use_libuv=1", {"store_type": "tcp", "use_libuv": "1"}),
        ("user=me,password=a=b", {"user": "me", "password": "a=b"}),
    ],
)
def test_what_is_read(text: str, found: dict[str, str]) -> None:
    """torchrun's keys and elaunch's; another spelling of a key becomes the key."""
    assert rdzvconf.rdzv_conf(text) == found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a", "has the unknown key 'a'"),
        ("=1", "is not of the form key=value"),
        ("timeout", "gives no value to the key 'timeout'"),
        ("timout=3", "has the unknown key 'timout'; did you mean 'timeout'?"),
        ("join-timeout=3", "did you mean 'join_timeout'?"),
        ("heart_beat=3", "did you mean 'heartbeat'?"),
        ("timeout=3,,is_host=1", "is not of the form key=value"),
        ("join_timeout=0", "has a bad value for 'join_timeout': '0' is not more than 0 seconds"),
        ("join_timeout=10x", "'10x' is not a number of seconds, nor one with a unit"),
        ("heartbeat=-1", "has a bad value for 'heartbeat': '-1' is less than 0"),
        ("settle=nan", "is not a finite number"),
        ("is_host=maybe", "is neither yes nor no"),
        ("store_type=file", "a store in a shared file, which elaunch does not have"),
        ("store_type=tpc", "did you mean 'tcp'?"),
        ("protocol=htps", "did you mean 'https'?"),
        ("keep_alive_max_attempt=0", "is less than 1"),
        ("rank=-1", "is less than 0"),
        ("settle=1,last_call_timeout=2", "has both 'settle' and 'last_call_timeout'"),
        ("cert=a,ssl_cert=a", "which are the same; give one"),
    ],
)
def test_what_is_refused(text: str, reason: str) -> None:
    """With the nearest name, or what is allowed."""
    with pytest.raises(ValueError) as error:
        rdzvconf.rdzv_conf(text)
    assert reason in str(error.value)


SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "text",
    [
        f"password={SECRET}",
        f"user=me,password={SECRET},unknown=1",
        f"password=a,{SECRET}",
        f"password=a,{SECRET}=b",
        f"pasword={SECRET}",
        f"passwd={SECRET},join_timeout=x",
        f"password={SECRET}\0",
        f"join_timeout=x,password={SECRET}",
        f"user=me,user_password={SECRET}",
    ],
)
@pytest.mark.parametrize("source", ["line", "variable", "file"])
def test_no_error_shows_a_password(job: Job, text: str, source: str) -> None:
    """Not one of a misspelt key, not one with a comma in it, from no source."""
    line = "--nnodes 2 --rdzv-backend etcd --rdzv-endpoint h"
    if source == "line":
        message = job.error(f"{line} --rdzv-conf {text} train.py")
    elif source == "variable":
        message = job.error(f"{line} train.py", PET_RDZV_CONF=text)
    else:
        shown = text.replace("\0", "\\0")
        job.write("j.yaml", f'entrypoint: train.py\nrdzv_conf: "{shown}"\n')
        message = job.error(f"{line} -f j.yaml")
    assert SECRET not in message


def test_what_is_shown_of_a_configuration() -> None:
    """From a password on, nothing."""
    assert rdzvconf.masked("is_host=1,password=x,y=z") == "is_host=1,password=(hidden)"
    assert rdzvconf.masked("password_file=/a,user=b") == "password_file=/a,user=b"
    assert rdzvconf.masked("passwd=x,user=b") == "passwd=(hidden),user=b"
    assert rdzvconf.masked("pasword=x,y,user=b") == "pasword=(hidden),user=b"


@pytest.mark.parametrize("key", ["timeot", "join-timeout", "is_hots", "usr", "nodes", "protocl"])
def test_an_unknown_key_that_is_no_secrets_is_shown_with_its_value(job: Job, key: str) -> None:
    """The value says what was meant."""
    assert f"'{key}=17,is_host=1'" in job.error(f"--rdzv-conf {key}=17,is_host=1 train.py")


@pytest.mark.parametrize(
    "key", ["pwd", "PASSWORD", "Pasword", "passwort", "user-password", "api_key", "tokn", "secrt"]
)
def test_an_unknown_key_that_looks_like_a_secrets_hides_its_value(job: Job, key: str) -> None:
    """A misspelt password must not be in a log."""
    message = job.error(f"--rdzv-conf is_host=1,{key}=17,19 train.py")
    assert f"{key}=(hidden)" in message and "17" not in message and "19" not in message
