"""Where the database comes from."""

from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from tests.fixtures.guard import StartRun
from tests.fixtures.server import Server

UNREACHABLE = "host=127.0.0.1 port=1 user=x dbname=x"


def database_of(start: StartRun, *arguments: str, **how: object) -> str:
    """Run a command that prints the database it is guarded in."""
    ran = start("run", "--settle", "off", "--key", "100:1", *arguments, "--", "printenv", "BATCHGUARD_DATABASE", **how)
    assert ran.code() == 0, ran.err
    return ran.out.strip()


def test_option_then_environment_then_config(start: StartRun, server: Server, tmp_path: Path) -> None:
    """--dsn beats BATCHGUARD_DSN, which beats the config file."""
    name = str(conninfo_to_dict(server.dsn)["dbname"])
    bad, good = tmp_path / "bad.toml", tmp_path / "good.toml"
    bad.write_text(f'dsn = "{UNREACHABLE}"\n')
    good.write_text(f'dsn = "{server.dsn}"\n')
    assert database_of(start, "--dsn", server.dsn, dsn=UNREACHABLE) == name
    assert database_of(start, "--config", str(bad)) == name
    assert database_of(start, "--config", str(good), env={"BATCHGUARD_DSN": ""}) == name


def test_pg_variables_fill_gaps(start: StartRun, server: Server) -> None:
    """PG* gives what the DSN leaves out, as with psql."""
    parts = {key: str(value) for key, value in conninfo_to_dict(server.dsn).items()}
    variables = {
        "PGHOST": parts["host"],
        "PGPORT": parts["port"],
        "PGUSER": parts["user"],
        "PGPASSWORD": parts.get("password", ""),
    }
    assert database_of(start, dsn=f"dbname={parts['dbname']}", env=variables) == parts["dbname"]


def test_service_file(start: StartRun, server: Server, tmp_path: Path) -> None:
    """service=NAME is read from the service file, with several hosts too: the first that answers is taken."""
    parts = {key: str(value) for key, value in conninfo_to_dict(server.dsn).items()}
    file = tmp_path / "services"
    lines = [f"{key}={value}" for key, value in parts.items() if key not in ("host", "port")]
    file.write_text("\n".join(["[batch]", f"host=127.0.0.1,{parts['host']}", f"port=1,{parts['port']}", *lines, ""]))
    assert database_of(start, dsn="service=batch", env={"PGSERVICEFILE": str(file)}) == parts["dbname"]


def test_uri(start: StartRun, server: Server) -> None:
    """A URI works as a conninfo does."""
    parts = {key: str(value) for key, value in conninfo_to_dict(server.dsn).items()}
    secret = f":{parts['password']}" if "password" in parts else ""
    uri = f"postgresql://{parts['user']}{secret}@{parts['host']}:{parts['port']}/{parts['dbname']}?target_session_attrs=any"
    assert database_of(start, dsn=uri) == parts["dbname"]
