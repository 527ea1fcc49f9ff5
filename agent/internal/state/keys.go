package state

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/protocol"
)

func partKey(sum string) string { return prePart + sum }

// bundleKey sorts by version.
func bundleKey(b protocol.Bundle) string { return fmt.Sprintf("%s%020d", preBundle, b.Version()) }

func segmentKey(incarnation string, number uint64) string {
	return preSegment + incarnation + "/" + string(binary.BigEndian.AppendUint64(nil, number))
}

func segmentNumber(key, incarnation string) (uint64, bool) {
	tail, ok := strings.CutPrefix(key, preSegment+incarnation+"/")
	if !ok || len(tail) != 8 {
		return 0, false
	}
	return binary.BigEndian.Uint64([]byte(tail)), true
}

// read copies one entry of the disk to the mirror; the node's own records need their authentication code.
func (s *Store) read(key string, value []byte) error {
	prefix, _, _ := strings.Cut(key, "/")
	switch prefix {
	case keyState, "bundle", "part", "batch", "segment":
		return s.d.read(key, value)
	}
	return s.readRecord(key, value)
}

// read copies one entry of the disk to the mirror. Keys of meta and chain sort before those of segments.
func (d *data) read(key string, value []byte) error {
	switch key {
	case keyMeta:
		return json.Unmarshal(value, &d.meta)
	case keySample:
		return json.Unmarshal(value, &d.sample)
	case keyChain:
		return json.Unmarshal(value, &d.chain)
	case keyMarks:
		return json.Unmarshal(value, &d.marks)
	case keyStamp:
		return json.Unmarshal(value, &d.stamp)
	case keyState:
		d.stored[key] = slices.Clone(value)
		return nil
	}
	prefix, rest, _ := strings.Cut(key, "/")
	switch prefix + "/" {
	case prePart, preBundle, preBatch:
		d.stored[key] = slices.Clone(value)
		return nil
	case preMember:
		return readJSON(d.members, rest, value)
	case preRun:
		return readJSON(d.runs, rest, value)
	case preConsumed:
		return readJSON(d.consumed, rest, value)
	case preInterval:
		var iv meter.Interval
		err := json.Unmarshal(value, &iv)
		d.meter.Intervals = append(d.meter.Intervals, iv)
		return err
	case preMetered:
		var m meter.Member
		err := json.Unmarshal(value, &m)
		d.meter.Members = append(d.meter.Members, m)
		return err
	case preSegment:
		// gcSegments removes the segments of other incarnations.
		if number, ok := segmentNumber(key, d.chain.Incarnation); ok {
			d.sizes[number] = int64(len(value))
		}
		return nil
	}
	// A newer release may have written the key; it stays.
	return nil
}

func readJSON[T any](into map[string]T, key string, value []byte) error {
	var v T
	if err := json.Unmarshal(value, &v); err != nil {
		return err
	}
	into[key] = v
	return nil
}
