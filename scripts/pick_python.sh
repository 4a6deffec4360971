#!/usr/bin/env bash
# Prints the path of the newest Python from 3.11 up that can make an environment.
# With an argument such as 3.11: the newest one of exactly that minor version.
#
# Every candidate is run: a name on PATH proves nothing, since pyenv puts shims
# there that fail for versions that are not selected.
set -u
want="${1:-}"

probe='
import sys, sysconfig
import ensurepip, venv
v = sys.version_info
if v[:2] < (3, 11) or v[3] != "final" or sys.implementation.name != "cpython":
    sys.exit(1)
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(1)
# Inside an environment: the interpreter it was made from, which outlives it.
path = getattr(sys, "_base_executable", None) or sys.executable
print("%d.%d %d %d %d %s" % (v[0], v[1], v[0], v[1], v[2], path))
'

# Names that are too old by themselves are left out.
candidates() {
    local folder file
    local folders=()
    IFS=: read -r -a folders <<< "$PATH"
    for folder in ${folders[@]+"${folders[@]}"}; do
        for file in "$folder"/python3 "$folder"/python3.1[1-9] \
            "$folder"/python3.[2-9][0-9]; do
            [ -x "$file" ] && printf '%s\n' "$file"
        done
    done
    for file in "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/*/bin/python3; do
        [ -x "$file" ] && printf '%s\n' "$file"
    done
}

usable() {
    local file line
    while IFS= read -r file; do
        line=$("$file" -I -c "$probe" </dev/null 2>/dev/null) || continue
        if [ -z "$want" ] || [ "${line%% *}" = "$want" ]; then
            printf '%s\n' "$line"
        fi
    done
}

# Stable: of equal versions the first on PATH wins.
best=$(candidates | usable | sort -s -k2,2nr -k3,3nr -k4,4nr | head -n 1 | cut -d' ' -f5-)
if [ -z "$best" ]; then
    echo "No usable Python ${want:-3.11 or newer} found on PATH or under pyenv." \
        "It needs the venv and ensurepip modules (on Debian: python3-venv)." >&2
    exit 1
fi
printf '%s\n' "$best"
