package protocol

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// maxNesting limits how deep messages nest; the deepest valid one is 8.
const maxNesting = 32

// ErrTooManyElements is returned for an encoded message that is small on the wire and large once it is decoded.
var ErrTooManyElements = errors.New("protocol: message has too many elements")

// Unmarshal decodes raw into m. It counts elements on the wire first: two bytes there may become hundreds in memory.
func Unmarshal(raw []byte, m proto.Message) error {
	left := MaxElements
	if err := countElements(m.ProtoReflect().Descriptor(), raw, &left, maxNesting); err != nil {
		return err
	}
	return proto.Unmarshal(raw, m)
}

// countElements takes the nested messages and list entries of raw from left.
func countElements(d protoreflect.MessageDescriptor, raw []byte, left *int, depth int) error {
	if depth == 0 {
		return fmt.Errorf("%w: %s is nested too deep", ErrTooManyElements, d.Name())
	}
	fields := d.Fields()
	for len(raw) > 0 {
		number, wire, n := protowire.ConsumeTag(raw)
		if n < 0 {
			return protowire.ParseError(n)
		}
		raw = raw[n:]
		n = protowire.ConsumeFieldValue(number, wire, raw)
		if n < 0 {
			return protowire.ParseError(n)
		}
		value := raw[:n]
		raw = raw[n:]
		field := fields.ByNumber(number)
		if field == nil || field.Message() == nil && !field.IsList() {
			continue
		}
		cost := 1
		content, _ := protowire.ConsumeBytes(value)
		isBytes := wire == protowire.BytesType
		if isBytes && field.Message() == nil && field.Kind() != protoreflect.StringKind &&
			field.Kind() != protoreflect.BytesKind {
			cost = len(content) // a packed list has at most as many entries as bytes
		}
		if *left -= cost; *left < 0 {
			return fmt.Errorf("%w: more than %d in %s", ErrTooManyElements, MaxElements, d.Name())
		}
		if isBytes && field.Message() != nil {
			if err := countElements(field.Message(), content, left, depth-1); err != nil {
				return err
			}
		}
	}
	return nil
}
