package state

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

const (
	reserveName = "reserve"
	// slotBytes bounds the changes that wait for space on the disk; the reserve file has two slots.
	slotBytes   = 8 << 20
	slots       = 2
	slotVersion = 1
)

// errReserveFull: the changes that wait do not fit into a slot.
var errReserveFull = errors.New("state: the reserve file is full")

// pending are changes that wait for space on the disk, by key; nil stands for a deletion.
type pending map[string][]byte

// add adds what a batch writes; later changes replace earlier ones.
func (p pending) add(b *batch) {
	for _, key := range b.deletes {
		p[key] = nil
	}
	for _, e := range b.sets {
		p[e.key] = append([]byte{}, e.value...) // never nil
	}
}

// reserve is a file whose blocks were allocated while there was space, so that it can be written on a full disk. Each
// write puts all pending changes into the slot that does not hold the newest ones: a torn write leaves the other slot
// whole.
type reserve struct {
	file   *os.File
	number uint64
}

// slotHeader precedes the changes in a slot. SHA256 is of the header without it and the changes: an altered number
// would make the older slot the newest.
type slotHeader struct {
	Version, Number, Length uint64
	SHA256                  [sha256.Size]byte
}

func (h slotHeader) sum(body []byte) [sha256.Size]byte {
	var head []byte
	for _, n := range []uint64{h.Version, h.Number, h.Length} {
		head = binary.BigEndian.AppendUint64(head, n)
	}
	return sha256.Sum256(append(head, body...))
}

// openReserve opens the file, makes it where allocate says that there is space for it, and returns the changes in it.
// Without a file it returns nil.
func openReserve(path string, allocate bool) (*reserve, pending, error) {
	flags := os.O_RDWR
	if allocate {
		flags |= os.O_CREATE
	}
	file, err := os.OpenFile(path, flags, 0o600)
	if errors.Is(err, os.ErrNotExist) {
		return nil, pending{}, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("open the reserve file: %w", err)
	}
	if allocate {
		if err := unix.Fallocate(int(file.Fd()), 0, 0, slots*slotBytes); err != nil {
			return nil, nil, errors.Join(fmt.Errorf("allocate the reserve file: %w", err), file.Close())
		}
	}
	r, newest := &reserve{file: file}, pending{}
	for slot := range int64(slots) {
		number, changes, ok := readSlot(file, slot*slotBytes)
		if ok && number > r.number {
			r.number, newest = number, changes
		}
	}
	return r, newest, nil
}

func readSlot(file *os.File, at int64) (number uint64, changes pending, ok bool) {
	var h slotHeader
	raw := make([]byte, binary.Size(h))
	if _, err := file.ReadAt(raw, at); err != nil {
		return 0, nil, false
	}
	if _, err := binary.Decode(raw, binary.BigEndian, &h); err != nil || h.Version != slotVersion || h.Length > slotBytes {
		return 0, nil, false
	}
	body := make([]byte, h.Length)
	if _, err := file.ReadAt(body, at+int64(len(raw))); err != nil || h.sum(body) != h.SHA256 {
		return 0, nil, false
	}
	changes, err := decodePending(body)
	return h.Number, changes, err == nil
}

// save makes the changes durable, if they take at most this many bytes.
func (r *reserve) save(changes pending, most int) error {
	if r == nil {
		return errors.New("state: there is no reserve file")
	}
	body := encodePending(changes)
	h := slotHeader{Version: slotVersion, Number: r.number + 1, Length: uint64(len(body))}
	h.SHA256 = h.sum(body)
	raw, err := binary.Append(nil, binary.BigEndian, h)
	if err != nil {
		return err
	}
	if len(raw)+len(body) > most {
		return errReserveFull
	}
	at := int64(h.Number%slots) * slotBytes
	if _, err := r.file.WriteAt(append(raw, body...), at); err != nil {
		return fmt.Errorf("write the reserve file: %w", err)
	}
	if err := unix.Fdatasync(int(r.file.Fd())); err != nil {
		return fmt.Errorf("sync the reserve file: %w", err)
	}
	r.number = h.Number
	return nil
}

func (r *reserve) close() error {
	if r == nil {
		return nil
	}
	return r.file.Close()
}

// encodePending writes each change as key, a byte that is 1 for a value and 0 for a deletion, and the value.
func encodePending(changes pending) []byte {
	var out []byte
	text := func(b []byte) { out = append(binary.AppendUvarint(out, uint64(len(b))), b...) }
	for _, key := range slices.Sorted(maps.Keys(changes)) {
		text([]byte(key))
		if value := changes[key]; value != nil {
			out = append(out, 1)
			text(value)
			continue
		}
		out = append(out, 0)
	}
	return out
}

func decodePending(raw []byte) (pending, error) {
	in, out := bytes.NewReader(raw), pending{}
	text := func() ([]byte, error) {
		n, err := binary.ReadUvarint(in)
		if err != nil || n > uint64(in.Len()) {
			return nil, errors.Join(err, errors.New("state: damaged reserve"))
		}
		b := make([]byte, n)
		_, err = in.Read(b)
		if n == 0 {
			err = nil
		}
		return b, err
	}
	for in.Len() > 0 {
		key, err := text()
		if err != nil {
			return nil, err
		}
		kind, err := in.ReadByte()
		if err != nil {
			return nil, err
		}
		out[string(key)] = nil
		if kind == 0 {
			continue
		}
		if out[string(key)], err = text(); err != nil {
			return nil, err
		}
	}
	return out, nil
}
