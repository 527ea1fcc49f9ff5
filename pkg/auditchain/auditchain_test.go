package auditchain_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/pkg/auditchain"
)

// The examples of RFC 8785, §3.2.2 and §3.2.3, as far as records may hold such values.
func TestCanonicalFormIsThatOfRFC8785(t *testing.T) {
	for _, c := range []struct{ name, in, out string }{
		{
			"names by UTF-16 code units",
			`{"€":"Euro Sign","\r":"Carriage Return","\ufb33":"Hebrew Letter Dalet With Dagesh","1":"One",` +
				`"😀":"Emoji: Grinning Face","\u0080":"Control","ö":"Latin Small Letter O With Diaeresis"}`,
			`{"\r":"Carriage Return","1":"One","` + "\u0080" + `":"Control","ö":"Latin Small Letter O With Diaeresis",` +
				`"€":"Euro Sign","😀":"Emoji: Grinning Face","` + "\ufb33" + `":"Hebrew Letter Dalet With Dagesh"}`,
		},
		{
			"strings",
			`{"string":"\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/<>&\u2028\u007f","literals":[null,true,false]}`,
			`{"literals":[null,true,false],"string":"€$\u000f\nA'B\"\\\\\"/<>&` + "\u2028\u007f" + `"}`,
		},
		{
			"integers", `{ "b" : [ -9007199254740991, 9007199254740991, 0 ], "a": {} }`,
			`{"a":{},"b":[-9007199254740991,9007199254740991,0]}`,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, err := auditchain.Canonical([]byte(c.in))
			require.NoError(t, err)
			require.Equal(t, c.out, string(out))
		})
	}
	for _, bad := range []string{
		`{"a":1.5}`, `{"a":1e2}`, `{"a":-0}`, `{"a":9007199254740992}`, `[]`, `null`, `{} {}`, ``,
	} {
		_, err := auditchain.Canonical([]byte(bad))
		require.Error(t, err, bad)
	}
}

// The record of docs/design/audit.md.
func TestHashOfADocumentedRecord(t *testing.T) {
	hash, err := auditchain.Hash([]byte(`{"number":1,"action":"iam.org.create","hash":"not hashed"}`))
	require.NoError(t, err)
	// printf '{"action":"iam.org.create","number":1}' | sha256sum
	require.Equal(t, "b6b5a084f9cc1f69412b5831144417999ac8b92a8102113b74021db42d4f1ce0", hash)
}

type record = map[string]any

// chainOf makes n records that follow each other, as the hub exports them.
func chainOf(t require.TestingT, n int, orgID string) [][]byte {
	lines, previous := [][]byte{}, auditchain.First
	for number := 1; number <= n; number++ {
		r := record{
			"id": fmt.Sprintf("id-%d", number), "number": number, "previous_hash": previous, "org_id": orgID,
			"actor": record{"type": "user", "id": "u"}, "action": "apps.instance.create", "outcome": "done",
			"after": record{"revision": number, "names": []string{"a", "b"}}, "reason": "änderung <1>",
		}
		line, hash := seal(t, r)
		lines, previous = append(lines, line), hash
	}
	return lines
}

// seal hashes a record and writes it as it is exported.
func seal(t require.TestingT, r record) (line []byte, hash string) {
	delete(r, "hash")
	raw, err := json.Marshal(r)
	require.NoError(t, err)
	hash, err = auditchain.Hash(raw)
	require.NoError(t, err)
	r["hash"] = hash
	return write(t, r), hash
}

func write(t require.TestingT, r record) []byte {
	raw, err := json.Marshal(r)
	require.NoError(t, err)
	line, err := auditchain.Canonical(raw)
	require.NoError(t, err)
	return line
}

func verify(lines [][]byte, saved auditchain.Head) (auditchain.Head, error) {
	v := auditchain.Verifier{Saved: saved}
	for _, line := range lines {
		if err := v.Add(line); err != nil {
			return v.Head(), err
		}
	}
	return v.Head(), v.End()
}

func headOf(t require.TestingT, line []byte) (h auditchain.Head) {
	require.NoError(t, json.Unmarshal(line, &h))
	return h
}

func TestAWholeChainIsFoundWhole(t *testing.T) {
	lines := chainOf(t, 9, "org")
	end := headOf(t, lines[8])
	for from := range lines {
		for to := from + 1; to <= len(lines); to++ {
			head, err := verify(lines[from:to], auditchain.Head{})
			require.NoError(t, err)
			require.Equal(t, headOf(t, lines[to-1]), head)
		}
		// A head that was saved just before the run, or in it, ties the run to what was seen then.
		for saved := max(from-1, 0); saved < len(lines); saved++ {
			head, err := verify(lines[from:], headOf(t, lines[saved]))
			require.NoError(t, err)
			require.Equal(t, end, head)
		}
	}
	head, err := verify(nil, auditchain.Head{})
	require.NoError(t, err)
	require.Zero(t, head)
}

// Whatever is changed between the first record and a saved head is noticed, even where the forger makes hashes that
// fit.
func TestEveryKindOfTamperingIsNoticed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 12).Draw(t, "records")
		lines := chainOf(t, n, "org")
		saved := headOf(t, lines[n-1])
		at := rapid.IntRange(0, n-1).Draw(t, "at")
		switch kind := rapid.SampledFrom([]string{"field", "byte", "delete", "swap", "insert", "cut", "forge"}).
			Draw(t, "kind"); kind {
		case "field":
			r := parse(t, lines[at])
			alter(t, r)
			lines[at] = write(t, r)
		case "byte":
			i := rapid.IntRange(0, len(lines[at])-1).Draw(t, "byte")
			lines[at] = bytes.Clone(lines[at])
			lines[at][i] ^= byte(rapid.IntRange(1, 255).Draw(t, "bits"))
		case "delete":
			// Without its first records a chain is whole: they are past their retention.
			at = max(at, 1)
			lines = slices.Delete(lines, at, at+1)
		case "swap":
			other := rapid.IntRange(0, n-1).Filter(func(o int) bool { return o != at }).Draw(t, "other")
			lines[at], lines[other] = lines[other], lines[at]
		case "insert":
			extra := rapid.SampledFrom(append(chainOf(t, n, "other"), lines...)).Draw(t, "extra")
			lines = slices.Insert(lines, at, extra)
		case "cut":
			lines = lines[:at]
		case "forge":
			// The forger hashes everything anew from the changed record on.
			r := parse(t, lines[at])
			delete(r, "hash")
			alter(t, r)
			var hash string
			lines[at], hash = seal(t, r)
			for i := at + 1; i < n; i++ {
				r = parse(t, lines[i])
				r["previous_hash"] = hash
				lines[i], hash = seal(t, r)
			}
		}
		_, err := verify(lines, saved)
		require.Error(t, err)
	})
}

// alter changes a member of a record, takes one away, or adds one.
func alter(t *rapid.T, r record) {
	const more = "new"
	name := rapid.SampledFrom(append(slices.Sorted(maps.Keys(r)), more)).Draw(t, "member")
	switch {
	case name == "after":
		r[name].(record)["revision"] = json.Number("99")
	case name != more && rapid.Bool().Draw(t, "gone"):
		delete(r, name)
	case name == "number":
		r[name] = json.Number("99")
	default:
		r[name] = "x"
	}
}

func parse(t require.TestingT, line []byte) record {
	dec := json.NewDecoder(bytes.NewReader(line))
	dec.UseNumber()
	var r record
	require.NoError(t, dec.Decode(&r))
	return r
}

// A verifier names the first record that is wrong.
func TestTheFirstWrongRecordIsNamed(t *testing.T) {
	whole := chainOf(t, 5, "org")
	other := chainOf(t, 5, "other")
	for _, c := range []struct {
		name, says string
		lines      [][]byte
		saved      auditchain.Head
	}{
		{"changed", "record 3 (id-3) is changed", slices.Concat(whole[:2],
			[][]byte{bytes.Replace(whole[2], []byte(`"user"`), []byte(`"node"`), 1)}, whole[3:]), auditchain.Head{}},
		{
			"written otherwise", "record 3 is changed: it is not written as RFC 8785 says",
			slices.Concat(whole[:2], [][]byte{append([]byte(" "), whole[2]...)}),
			auditchain.Head{},
		},
		{"missing", "record 3 is missing: 4 comes after 2", slices.Concat(whole[:2], whole[3:]), auditchain.Head{}},
		{"twice", "record 2 (id-2) stands after record 2", slices.Concat(whole[:2], whole[1:]), auditchain.Head{}},
		{"of another org", "record id-3 is of another chain", slices.Concat(whole[:2], other[2:]), auditchain.Head{}},
		{"cut", "record 4 is missing: the chain ends before the saved head, 5", whole[:3], headOf(t, whole[4])},
		{"all cut", "record 1 is missing", nil, headOf(t, whole[4])},
		{"begins too late", "record 2 is missing: the first is 4", whole[3:], headOf(t, whole[0])},
		{"not the saved", "record 2 (id-2) is not the one of the saved head", whole, headOf(t, other[1])},
		{"does not follow the saved", "record 2 (id-2) does not follow record 1", whole[1:], headOf(t, other[0])},
		{"no record", "record 1 is unreadable", [][]byte{[]byte("x")}, auditchain.Head{}},
		{"no number", "has no number", [][]byte{[]byte(`{"id":"a"}`)}, auditchain.Head{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := verify(c.lines, c.saved)
			require.ErrorContains(t, err, c.says)
		})
	}
}
