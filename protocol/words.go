package protocol

import (
	"fmt"
	"strconv"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// unknownPrefix starts the word of an enum value of a newer peer; its number follows.
const unknownPrefix = "unknown_"

// word returns the lower-case name of an enum value, as the API, events, logs and stored rows spell it. It is empty for
// the unspecified value and unknown_<number> for a value of a newer peer.
func word(e protoreflect.Enum) string {
	n := e.Number()
	if n == 0 {
		return ""
	}
	v := e.Descriptor().Values().ByNumber(n)
	if v == nil {
		return unknownPrefix + strconv.Itoa(int(n))
	}
	return strings.ToLower(string(v.Name()))
}

// number is the inverse of word.
func number(e protoreflect.Enum, text string) (int32, error) {
	if text == "" {
		return 0, nil
	}
	if digits, ok := strings.CutPrefix(text, unknownPrefix); ok {
		if n, err := strconv.ParseInt(digits, 10, 32); err == nil {
			return int32(n), nil
		}
	}
	d := e.Descriptor()
	v := d.Values().ByName(protoreflect.Name(strings.ToUpper(text)))
	if v == nil || v.Number() == 0 {
		return 0, fmt.Errorf("protocol: %q is no %s", text, d.FullName())
	}
	return int32(v.Number()), nil
}

// Text returns the word of the kind: state, leases, bundle, usage.
func (k Envelope_Kind) Text() string { return word(k) }

// Text returns the word of the reason, like signature_invalid; empty for none.
func (r Nack_Reason) Text() string { return word(r) }

// Text returns the word of the status, like ready; empty for none.
func (s WorkloadStatus_Status) Text() string { return word(s) }

// Text returns the word of the reason, like crash_loop; empty for none.
func (r WorkloadStatus_Reason) Text() string { return word(r) }

// Stored documents, the local API and logs hold words, not numbers.

// MarshalText writes the word of the status.
func (s WorkloadStatus_Status) MarshalText() ([]byte, error) { return []byte(word(s)), nil }

// MarshalText writes the word of the reason.
func (r WorkloadStatus_Reason) MarshalText() ([]byte, error) { return []byte(word(r)), nil }

// UnmarshalText reads what MarshalText wrote.
func (s *WorkloadStatus_Status) UnmarshalText(text []byte) error {
	n, err := number(*s, string(text))
	*s = WorkloadStatus_Status(n)
	return err
}

// UnmarshalText reads what MarshalText wrote.
func (r *WorkloadStatus_Reason) UnmarshalText(text []byte) error {
	n, err := number(*r, string(text))
	*r = WorkloadStatus_Reason(n)
	return err
}
