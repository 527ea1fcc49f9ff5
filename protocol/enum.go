package protocol

import (
	"fmt"
	"strconv"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// unknownPrefix starts the text of an enum value of a newer peer; its number follows.
const unknownPrefix = "unknown_"

// enumText returns the lower-case name of an enum value, as the API, events, logs and stored rows spell it. It is empty
// for the unspecified value and unknown_<number> for a value of a newer peer.
func enumText(e protoreflect.Enum) string {
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

// parseEnum is the inverse of enumText.
func parseEnum(e protoreflect.Enum, text string) (int32, error) {
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

// Text returns the text of the kind: state, leases, bundle, usage.
func (k Envelope_Kind) Text() string { return enumText(k) }

// Text returns the text of the reason, like signature_invalid; empty for none.
func (r Nack_Reason) Text() string { return enumText(r) }

// Text returns the text of the status, like ready; empty for none.
func (s WorkloadStatus_Status) Text() string { return enumText(s) }

// Text returns the text of the reason, like crash_loop; empty for none.
func (r WorkloadStatus_Reason) Text() string { return enumText(r) }

// Text returns the text of the service's status, like unhealthy; empty for none.
func (s ServiceStatus_Status) Text() string { return enumText(s) }

// Text returns the text of the condition, like service_healthy; empty for none.
func (c Dependency_Condition) Text() string { return enumText(c) }

// Stored documents, the local API and logs hold texts, not numbers.

// MarshalText writes the text of the status.
func (s WorkloadStatus_Status) MarshalText() ([]byte, error) { return []byte(enumText(s)), nil }

// MarshalText writes the text of the reason.
func (r WorkloadStatus_Reason) MarshalText() ([]byte, error) { return []byte(enumText(r)), nil }

// UnmarshalText reads what MarshalText wrote.
func (s *WorkloadStatus_Status) UnmarshalText(text []byte) error {
	n, err := parseEnum(*s, string(text))
	*s = WorkloadStatus_Status(n)
	return err
}

// UnmarshalText reads what MarshalText wrote.
func (r *WorkloadStatus_Reason) UnmarshalText(text []byte) error {
	n, err := parseEnum(*r, string(text))
	*r = WorkloadStatus_Reason(n)
	return err
}
