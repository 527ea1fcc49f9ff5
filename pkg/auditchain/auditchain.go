// Package auditchain is the hash chain of an audit trail: which bytes of a record are hashed, and the check that a run
// of exported records is whole. The hub writes the hashes; the check needs no hub. It reads no file and opens no
// connection. docs/design/audit.md describes the chain for programs in other languages.
package auditchain

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
)

// First is the previous_hash of a chain's first record.
const First = "0000000000000000000000000000000000000000000000000000000000000000"

// Head names a record: all records of the chain up to it follow from its hash.
type Head struct {
	Number int64  `json:"number"`
	Hash   string `json:"hash"`
}

// Verifier checks the exported records of one chain, given in their order.
type Verifier struct {
	// Saved, where it has a number, is a head that was noted earlier: the chain must still hold it.
	Saved Head

	orgID string
	first Head
	last  Head
}

// First returns the number of the first record, with the hash that it follows; zero before there was one.
func (v *Verifier) First() Head { return v.first }

// Head returns the last record; zero before there was one.
func (v *Verifier) Head() Head { return v.last }

// OrgID returns whose chain it is; empty for the platform's.
func (v *Verifier) OrgID() string { return v.orgID }

// link is what of a record makes it a link.
type link struct {
	ID           string `json:"id"`
	OrgID        string `json:"org_id"`
	Number       int64  `json:"number"`
	PreviousHash string `json:"previous_hash"`
	Hash         string `json:"hash"`
}

// Add checks the next record. Its error names the first record that is wrong or missing; nothing may be added then.
func (v *Verifier) Add(line []byte) error {
	at := v.last.Number + 1
	members, err := decode(line)
	if err != nil {
		return fmt.Errorf("record %d is unreadable: %w", at, err)
	}
	text, err := appendValue(nil, members)
	if err == nil && !bytes.Equal(text, line) {
		err = errors.New("it is not written as RFC 8785 says")
	}
	var l link
	if err == nil {
		err = json.Unmarshal(line, &l)
	}
	if err != nil {
		return fmt.Errorf("record %d is changed: %w", at, err)
	}
	if err := v.checkPlace(l); err != nil {
		return err
	}
	hash, err := hashOf(members)
	if err != nil || hash != l.Hash {
		return fmt.Errorf("record %d (%s) is changed: its content has the hash %s, and it says %s", l.Number, l.ID, hash,
			l.Hash)
	}
	if v.first.Number == 0 {
		v.first, v.orgID = Head{l.Number, l.PreviousHash}, l.OrgID
	}
	v.last = Head{l.Number, l.Hash}
	if l.Number == v.Saved.Number && l.Hash != v.Saved.Hash {
		return fmt.Errorf("record %d (%s) is not the one of the saved head", l.Number, l.ID)
	}
	return nil
}

// checkPlace checks that l is the record that comes next.
func (v *Verifier) checkPlace(l link) error {
	follows := v.last
	if v.last.Number == 0 {
		switch {
		case l.Number < 1:
			return fmt.Errorf("record %s has no number", l.ID)
		case l.Number == 1:
			follows = Head{0, First}
		case v.Saved.Number > 0 && l.Number > v.Saved.Number+1:
			return fmt.Errorf("record %d is missing: the first is %d", v.Saved.Number+1, l.Number)
		case l.Number == v.Saved.Number+1:
			follows = v.Saved
		default:
			follows = Head{l.Number - 1, l.PreviousHash}
		}
	} else if l.OrgID != v.orgID {
		return fmt.Errorf("record %s is of another chain than record %d before it", l.ID, v.last.Number)
	}
	switch {
	case l.Number > follows.Number+1:
		return fmt.Errorf("record %d is missing: %d comes after %d", follows.Number+1, l.Number, follows.Number)
	case l.Number <= follows.Number:
		return fmt.Errorf("record %d (%s) stands after record %d", l.Number, l.ID, follows.Number)
	case l.PreviousHash != follows.Hash:
		return fmt.Errorf("record %d (%s) does not follow record %d: it follows one with the hash %s", l.Number, l.ID,
			follows.Number, l.PreviousHash)
	}
	return nil
}

// End checks, after the last record, that the saved head was among them.
func (v *Verifier) End() error {
	if v.last.Number < v.Saved.Number {
		return fmt.Errorf("record %d is missing: the chain ends before the saved head, %d", v.last.Number+1, v.Saved.Number)
	}
	return nil
}
