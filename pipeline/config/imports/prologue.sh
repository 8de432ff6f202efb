# What bash executes before a script that pipeline/config/imports/bash.py evaluates.
#
# The names at @...@ are replaced. A record consists of words, each preceded by the id of the process
# that writes it, because the parts of a pipe write at the same time.

_retrace_write() {
  local word
  for word in "$@"; do printf '%s:%s\0' "$BASHPID" "$word" >&@FD@; done
}

# Record a command: the line, the words, the working folder, the environment, the unset variables.
_retrace_record() {
  local _retrace_line=$1 _retrace_name IFS=$' \n'
  for _retrace_name in "${BASH_SOURCE[@]}"; do
    [[ $_retrace_name == @FOLDER@/prologue.sh ]] && continue
    [[ $_retrace_name == @FOLDER@/* ]] && _retrace_line+=" of $_retrace_name"
    break
  done
  _retrace_write "$_retrace_line" "${@:2}" $'\1' "$PWD"
  for _retrace_name in $(compgen -e); do
    [[ $_retrace_name == _retrace_* ]] || _retrace_write "$_retrace_name=${!_retrace_name-}"
  done
  for _retrace_name in @READ@; do
    [[ -v $_retrace_name ]] || _retrace_write "$_retrace_name"
  done
  _retrace_write $'\2'
}

# Take the place of a program. Where the program's output would show, print a text that names it.
# After many executions of a line, which then waits for a program, the program succeeds.
_retrace_program() {
  local line=$1 text= waits=127
  shift
  if [[ " $* " =~ \ (bash|sh|sbatch)(\ -[a-z]+)*\ $ || $1 == tee ]]; then
    IFS= read -r -d '' text
  fi
  _retrace_record "$line" "$@" ${text:+"$text"}
  (( ${_retrace_times[line]-0} <= @WAITS@ )) || waits=0
  [[ @PROBES@ == *" $line "* ]] || printf '@not-known:%s:%s@' "$line" "$1"
  return "$waits"
}

command_not_found_handle() {
  _retrace_program "${BASH_LINENO[0]}" "$@"
}

# Count the executions of a line of the script, and return whether the line is part of a loop that
# waits.
_retrace_waits() {
  [[ $2 != @FOLDER@/prologue.sh ]] || return 1
  _retrace_times[$1]=$(( ${_retrace_times[$1]-0} + 1 ))
  (( _retrace_times[$1] > @WAITS@ ))
}

exit() {
  local code=${1-$?}
  _retrace_record "${BASH_LINENO[0]}" exit "$code"
  builtin exit "$code"
}

exec() {
  (( $# )) || return 0
  "$@"
  builtin exit
}

ulimit() { :; }

# Restricted mode refuses `cd`, so these functions change PWD, which need not exist here.
cd() {
  while [[ ${1-} == -[LPe@]* || ${1-} == -- ]]; do shift; done
  local to=${1-$HOME}
  [[ $to == - ]] && to=$OLDPWD && printf '%s\n' "$to"
  [[ -n $to ]] || return 0
  OLDPWD=$PWD
  if [[ $to == @not-* ]]; then PWD=$to; return; fi
  PWD=$(command realpath -ms -- "$(_retrace_absolute "$to")")
}

pwd() {
  if [[ ${1-} == -P ]]; then command realpath -m -- "$PWD"; else printf '%s\n' "$PWD"; fi
}

pushd() {
  _retrace_pushed=("$PWD" "${_retrace_pushed[@]}")
  cd "${1-${_retrace_pushed[1]-$PWD}}"
}

popd() {
  cd "${_retrace_pushed[0]-$PWD}"
  _retrace_pushed=("${_retrace_pushed[@]:1}")
}

_retrace_absolute() {
  if [[ $1 == /* ]]; then printf '%s\n' "$1"; else printf '%s\n' "$PWD/$1"; fi
}

# Print the file of a test, or a file that does not exist for an empty name.
_retrace_tested() {
  (( $# )) || return 0
  if [[ -n $1 ]]; then _retrace_absolute "$@"; else printf '/dev/null/\n'; fi
}

realpath() {
  local word words=()
  for word in "$@"; do
    [[ $word == -* ]] || word=$(_retrace_absolute "$word")
    words+=("$word")
  done
  command realpath -m "${words[@]}"
}

readlink() {
  local word words=()
  for word in "$@"; do
    [[ $word == -* ]] || words+=("$(_retrace_absolute "$word")")
  done
  case " $* " in
    *" -f "* | *" -e "* | *" -m "* | *" --canonicalize"*) command realpath -m -- "${words[@]}" ;;
    *) command readlink -- "${words[@]}" ;;
  esac
}

git() {
  local top=$PWD words=("$@")
  [[ ${1-} == -C ]] && top=$(realpath -s -- "${2-}") && shift 2
  if [[ $* == "rev-parse --show-toplevel" ]]; then
    while [[ -n $top && ! -e $top/.git ]]; do top=${top%/*}; done
    [[ -n $top ]] && realpath "$top" && return
  fi
  _retrace_program "${BASH_LINENO[0]}" git "${words[@]}"
}

cat() {
  [[ $# == 0 || $* == - ]] || { _retrace_program "${BASH_LINENO[0]}" cat "$@"; return; }
  local text
  IFS= read -r -d '' text
  printf '%s' "$text"
  [[ $text == *main_ppo* || $text == *main_dapo* ]] &&
    _retrace_record "${BASH_LINENO[0]}" cat "$text"
  return 0
}

# Files are read from harmless copies, which a later evaluation of the script provides.
_retrace_read_file() {
  local file name
  file=$(command realpath -ms -- "$(_retrace_absolute "${2-}")")
  name=${_retrace_files[$file]-}
  [[ -n $name ]] || { _retrace_record "$1" source "$file"; return 0; }
  _retrace_source=("$file" "${_retrace_source[@]}")
  builtin source "$name" "${@:3}"
  _retrace_source=("${_retrace_source[@]:1}")
}

source() {
  _retrace_read_file "${BASH_LINENO[0]}" "$@"
}

.() {
  _retrace_read_file "${BASH_LINENO[0]}" "$@"
}

declare -A _retrace_files=(@SOURCED@)
_retrace_times=()
_retrace_pushed=()
_retrace_source=(@SCRIPT@)
_retrace_PATH=@PATH@
@PROGRAMS@
builtin set -T
# No program succeeds, so errors never end the script. A loop that only sleeps is ended.
trap 'builtin set +ex; _retrace_waits "$LINENO" "${BASH_SOURCE-}" && [[ $BASH_COMMAND == sleep* ]] && break' DEBUG
