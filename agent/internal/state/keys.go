package state

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/protocol"
)

func partKey(sum string) string { return prePart + sum }

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

// read takes one entry of the disk into the mirror. Keys of meta and chain sort before those of segments.
func (d *data) read(key string, value []byte) error {
	switch key {
	case keyMeta:
		return json.Unmarshal(value, &d.meta)
	case keyMeter:
		return json.Unmarshal(value, &d.meter)
	case keyChain:
		return json.Unmarshal(value, &d.chain)
	case keyMarks:
		return json.Unmarshal(value, &d.marks)
	case keyStamp:
		return json.Unmarshal(value, &d.stamp)
	case keyBundle:
		return d.readBundle(value)
	case keyState:
		d.stateEnv, d.state = &protocol.Envelope{}, &protocol.DesiredState{}
		return unmarshalEnvelope(value, d.stateEnv, d.state)
	case keyBatch:
		d.batchEnv = &protocol.Envelope{}
		return proto.Unmarshal(value, d.batchEnv)
	}
	prefix, rest, _ := strings.Cut(key, "/")
	switch prefix + "/" {
	case preLease:
		l := &protocol.Lease{}
		d.leases[rest] = l
		return proto.Unmarshal(value, l)
	case prePart:
		w := &protocol.Workload{}
		d.parts[rest] = part{workload: w}
		return proto.Unmarshal(value, w)
	case preVerdict:
		return readJSON(d.verdicts, rest, value)
	case preMember:
		return readJSON(d.members, rest, value)
	case preRun:
		return readJSON(d.runs, rest, value)
	case preConsumed:
		return readJSON(d.consumed, rest, value)
	case preSegment:
		// Segments left by an incarnation that was given up half-way are removed by tidy.
		if number, ok := segmentNumber(key, d.chain.Incarnation); ok {
			d.sizes[number] = int64(len(value))
		}
		return nil
	}
	// A newer release may have written it; it is kept and not understood.
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

// readBundle trusts its own disk: the bundle was verified when it was accepted, and the fingerprint it was verified by is
// that of its own root.
func (d *data) readBundle(value []byte) error {
	env, m := &protocol.Envelope{}, &protocol.TrustBundle{}
	if err := unmarshalEnvelope(value, env, m); err != nil {
		return err
	}
	for _, r := range m.GetRoles() {
		if r.GetName() != protocol.RoleRoot || len(r.GetKeys()) == 0 {
			continue
		}
		b, err := protocol.VerifyBundle(env, r.GetKeys()[0].GetKeyId())
		d.bundle = b
		return err
	}
	return fmt.Errorf("the trust bundle has no root")
}

func unmarshalEnvelope(value []byte, env *protocol.Envelope, payload proto.Message) error {
	if err := proto.Unmarshal(value, env); err != nil {
		return err
	}
	return proto.Unmarshal(env.GetPayload(), payload)
}
