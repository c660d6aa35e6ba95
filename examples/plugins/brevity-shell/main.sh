# 1 for an answer of at most 100 characters, else 0. The socket is this program's standard input and output.
set -u
export LC_ALL=C # a character is a byte here, as lengths of frames count them

answer() {
    # The four bytes of a length, the most significant one first, and the text.
    printf "$(printf '\\x%02x\\x%02x\\x%02x\\x%02x' $((${#1} >> 24 & 255)) $((${#1} >> 16 & 255)) \
        $((${#1} >> 8 & 255)) $((${#1} & 255)))"
    printf '%s' "$1"
}

while read -r a b c d < <(head -c 4 | od -An -tu1) && [ -n "${d:-}" ]; do
    request=$(head -c $(((a << 24) + (b << 16) + (c << 8) + d)))
    case $(jq -r .method <<<"$request") in
    Init) answer '{"result": {"protocol": 1, "name": "brevity-shell", "kind": "reward-model"}}' ;;
    Call) answer "$(jq -c '{result: {rewards: [.payload.inputs[] | if (.completion | length) > 100 then 0 else 1 end]}}' \
        <<<"$request")" ;;
    Shutdown) answer '{"result": {}}' && exit 0 ;;
    *) answer '{"result": {}}' ;;
    esac
done
