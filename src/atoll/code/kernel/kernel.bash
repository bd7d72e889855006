# The functions inside a sandbox that execute cells of bash in one shell that stays.
#
# Owns what outlives a cell, how its status and line are told, and what `exit`, `set -e` and an interrupt do. Not here:
# the loop that runs cells. It is one line (`languages.py`), because bash counts the lines of a cell from the line on
# which it is run. Used by `code/session.py`, which starts the image's bash with this text: bash 4.4 or later. Other
# programs are used only to find files in the outbox (`stat`).
#
# Messages come on the channel, each ended by a NUL byte: `hello NONCE`, and `run CELL MARKER`, a newline, the code, a
# newline and a dot. Those to the host are the lines of JSON that `code/messages.py` describes. The channel is moved to a
# descriptor that scripts do not use. Programs inherit it; the host believes nothing that comes from it.
#
# A cell runs in the shell itself, so that everything it sets stays. What ends a shell, ends the cell: the handler of EXIT
# writes down variables, functions and options, and replaces the process by a new bash that reads them. Its children and
# open files stay, since it is the same process.

# shellcheck shell=bash disable=SC2034,SC2064,SC2154,SC2261

builtin readonly __atoll_channel=247 __atoll_out=248 __atoll_err=249 __atoll_state=246
builtin readonly "__atoll_directory=${4:-$PWD/outbox}"
__atoll_cell=

# A text as a string of JSON.
__atoll_json() {
  builtin local LC_ALL=C.UTF-8 "text=$1" result='' c i n
  for ((i = 0; i < ${#text} && i < 2000; i++)); do
    c=${text:i:1}
    builtin printf -v n %d "'$c"
    if [[ $c == [\"\\] ]]; then
      result+="\\$c"
    elif ((n >= 32 && n < 127)); then
      result+=$c
    elif ((n < 0 || n > 0x10ffff)); then
      result+='?'
    else
      if ((n > 0xffff)); then
        builtin printf -v c '\\u%04x\\u%04x' "$((0xd800 + ((n - 0x10000) >> 10)))" "$((0xdc00 + ((n - 0x10000) & 0x3ff)))"
      else
        builtin printf -v c '\\u%04x' "$n"
      fi
      result+=$c
    fi
  done
  builtin printf '"%s"' "$result"
}

# Wait for a cell. Its text is in __atoll_code then.
__atoll_next() {
  builtin local message
  while :; do
    if ! IFS='' builtin read -r -d '' -u "$__atoll_channel" message; then
      builtin trap - EXIT
      builtin exit 0
    fi
    if [[ $message == 'hello '* ]]; then
      builtin printf '{"t":"ready","nonce":"%s","version":"%s","running":null,"calls":[],"parts":[],"last":%s}\n' \
        "${message#hello }" "${BASH_VERSION%%(*}" "${__atoll_last:-null}" >&"$__atoll_channel"
    elif [[ $message == 'run '*$'\n.' ]]; then # the end is there: its host has not ended while it wrote
      __atoll_code=${message#*$'\n'}
      __atoll_code=${__atoll_code%$'\n.'}
      message=${message%%$'\n'*}
      message=${message#run }
      __atoll_marker=${message#* }
      __atoll_cell=${message%% *}
      __atoll_line='' __atoll_failed='' __atoll_interrupted='' __atoll_status=0
      builtin trap '__atoll_interrupted=1; builtin exit 130' INT USR2 # the second if the first is ignored
      builtin trap '__atoll_now=$?; [[ $BASH_COMMAND == "eval \"\$__atoll_code\""* ]] || __atoll_failed=$__atoll_now __atoll_line=$LINENO' ERR
      builtin return 0
    fi
  done
}

# The cell that runs, if one does, has ended with __atoll_status.
__atoll_end() {
  [[ $__atoll_cell ]] || builtin return 0
  builtin local error=null "handler=$__atoll_handler"
  __atoll_handler=
  builtin trap : INT
  builtin trap - ERR
  builtin set +eufnvx +o pipefail
  [[ ! $handler ]] || (builtin eval "$handler") >&"$__atoll_out" 2>&"$__atoll_err"
  [[ $__atoll_failed == "$__atoll_status" ]] || __atoll_line=
  if [[ $__atoll_interrupted ]]; then
    error=$(__atoll_error Interrupted "the cell was interrupted")
  elif ((__atoll_status)); then
    error=$(__atoll_error ExitStatus "exit status $__atoll_status")
  fi
  builtin local streams=''
  if builtin printf '\0atoll-cell-%s' "$__atoll_marker" >&"$__atoll_out"; then streams='"stdout"'; fi 2>/dev/null
  if builtin printf '\0atoll-cell-%s' "$__atoll_marker" >&"$__atoll_err"; then streams+="${streams:+,}\"stderr\""; fi 2>/dev/null
  __atoll_last="{\"t\":\"done\",\"cell\":$__atoll_cell,\"error\":$error,\"warnings\":[],\"streams\":[$streams],\"outbox\":["
  __atoll_outbox
  __atoll_last+=']}'
  __atoll_cell=
  builtin printf '%s\n' "$__atoll_last" >&"$__atoll_channel"
}

# An error as JSON: its type, its message, and the line of the cell if it is known.
__atoll_error() {
  builtin local lines source=''
  builtin mapfile -t lines <<<"$__atoll_code"
  [[ ! $__atoll_line ]] || source="line $__atoll_line: ${lines[__atoll_line - 1]}"$'\n'
  builtin printf '{"type":"%s","message":"%s","line":%s,"traceback":%s}' \
    "$1" "$2" "${__atoll_line:-null}" "$(__atoll_json "$source$1: $2")"
}

# Add the files in the outbox that are new or changed since the last cell.
__atoll_outbox() {
  [[ -d $__atoll_directory ]] || builtin return 0
  builtin local file found line path first=1 "before=$__atoll_seen"
  found=$(
    builtin shopt -s globstar nullglob dotglob
    for file in "$__atoll_directory"/**; do
      [[ -f $file && ! -L $file && $file != *$'\n'* ]] && builtin printf '%s\0' "$file"
    done | xargs -0 -r stat -c '%s %Y %i %n' -- 2>/dev/null
  )
  __atoll_seen=$'\n'$found$'\n'
  while IFS= builtin read -r line; do
    [[ $line && $before != *$'\n'"$line"$'\n'* ]] || continue
    path=${line#* * * }
    ((first)) || __atoll_last+=,
    first=0
    __atoll_last+="{\"path\":$(__atoll_json "${path#"$__atoll_directory"/}"),\"size\":${line%% *}}"
  done <<<"$found"
}

# What the next bash needs to go on.
__atoll_dump() {
  builtin local __atoll_name
  for __atoll_name in $(builtin compgen -v); do
    case $__atoll_name in
      BASH* | DIRSTACK | EUID | UID | PPID | SHELLOPTS | GROUPS | FUNCNAME | LINENO | PIPESTATUS | RANDOM | SRANDOM | \
        SECONDS | EPOCH* | COMP_* | _ | __atoll_channel | __atoll_out | __atoll_err | __atoll_state | \
        __atoll_directory | __atoll_name | __atoll_kernel | __atoll_loop) ;;
      *) builtin declare -p "$__atoll_name" ;;
    esac
  done
  builtin declare -f
  builtin alias -p
  builtin shopt -p
  builtin trap -p | while IFS= builtin read -r __atoll_name; do
    [[ $__atoll_name == *' '@(EXIT|SIGINT|SIGUSR2|ERR) ]] || builtin printf '%s\n' "$__atoll_name"
  done
} 2>/dev/null

# The shell ends, for whatever reason.
__atoll_exit() {
  __atoll_end
  builtin trap : INT
  exec 1>&"$__atoll_out" 2>&"$__atoll_err"
  exec 246< <(__atoll_dump)
  exec -a bash /proc/self/exe --norc --noprofile -c "$__atoll_loop" bash "$__atoll_kernel" "$__atoll_loop" \
    again "$__atoll_directory"
}

# `trap … EXIT` in a cell is for the end of the cell.
trap() {
  if ((BASH_SUBSHELL)) || (($# < 2)) || [[ $1 == -[lp] ]]; then
    builtin trap "$@"
    builtin return
  fi
  builtin local "action=$1" signal status=0
  [[ $action != -- ]] || { builtin shift; action=$1; }
  builtin shift
  for signal; do
    if [[ $signal == EXIT || $signal == 0 ]]; then
      [[ $action != - ]] || action=
      __atoll_handler=$action
    else
      builtin trap -- "$action" "$signal" || status=$?
    fi
  done
  builtin return "$status"
}

if [[ $3 == again ]]; then
  __atoll_restore=$(</proc/self/fd/246)
  exec 246<&-
else
  exec 247<&3 248>&1 249>&2 3>&-
fi
builtin readonly "__atoll_kernel=$1" "__atoll_loop=$2"
builtin trap : INT
builtin trap '__atoll_status=$?; __atoll_exit' EXIT
