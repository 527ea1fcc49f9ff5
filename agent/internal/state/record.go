package state

import (
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"slices"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// The node's own records carry an authentication code, which detects altered bytes. Signed documents need none.
const (
	codeVersion = 1
	codeBytes   = 16
	prefixBytes = 1 + codeBytes
)

// errAltered: a record does not have the authentication code that it was written with.
var errAltered = errors.New("state: the record was altered")

// withCode puts the code of key and value before the value.
func (s *Store) withCode(key string, value []byte) []byte {
	return slices.Concat([]byte{codeVersion}, s.code(key, value), value)
}

func (s *Store) code(key string, value []byte) []byte {
	h := hmac.New(sha256.New, s.key)
	h.Write([]byte(key))
	h.Write([]byte{0})
	h.Write(value)
	return h.Sum(nil)[:codeBytes]
}

// withoutCode checks a record's code and returns its value.
func (s *Store) withoutCode(key string, raw []byte) ([]byte, error) {
	if len(raw) < prefixBytes || raw[0] != codeVersion || !hmac.Equal(raw[1:prefixBytes], s.code(key, raw[prefixBytes:])) {
		return nil, errAltered
	}
	return raw[prefixBytes:], nil
}

// readRecord copies one of the node's own records to the mirror. An altered record is set aside; the records on which
// all usage depends must be intact.
func (s *Store) readRecord(key string, raw []byte) error {
	value, err := s.withoutCode(key, raw)
	needed := key == keyMeta || key == keyChain || key == keyMarks
	switch {
	case err != nil && needed:
		return err
	case err != nil:
		s.d.unverified[key] = "record_altered: the record does not have the code that it was written with"
		return nil //nolint:nilerr // it is set aside
	}
	return s.d.read(key, value)
}

// consumedAside reports whether what the member has used cannot be known: its record was altered.
func (d *data) consumedAside(memberID string) bool {
	_, aside := d.unverified[preConsumed+memberID]
	return aside
}

// ConsumedUnverified reports whether the record of what the member has used was altered. A lease that is accepted from
// then on counts from its own beginning: the hub gives none that the tenant cannot pay.
func (s *Store) ConsumedUnverified(memberID string) bool {
	return view(s, func(d *data) bool { return d.consumedAside(memberID) })
}

func unreadable(dir string, err error) error {
	return fault.New(fault.Unavailable, codeStateUnreadable,
		"The state in "+dir+" is damaged. Keep a copy of it, then start with an empty directory: the node takes a new "+
			"incarnation.", err)
}
