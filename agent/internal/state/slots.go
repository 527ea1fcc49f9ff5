package state

import (
	"crypto/hmac"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

const (
	slots       = 2
	slotVersion = 1
)

// errSlotFull: the content does not fit into a slot.
var errSlotFull = errors.New("state: the slot is full")

// slotFile is a file of two slots. Its blocks are allocated while there is space, so that it can be written on a full
// disk. Each write goes to the slot without the newest content, so that a torn write leaves the other slot whole.
type slotFile struct {
	path string
	// create makes a file that is missing; without it, its write fails.
	create    bool
	slotBytes int
	// code authenticates header and content: an altered number would make the older slot the newest.
	code func(raw []byte) []byte
	// number counts the writes; 0 while no slot is whole.
	number uint64
}

// slotHeader comes after the authentication code and before the content.
type slotHeader struct{ Version, Number, Length uint64 }

// read returns the newest content; nil where no slot is whole.
func (f *slotFile) read() (newest []byte, err error) {
	file, err := os.Open(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	for slot := range slots {
		number, content, ok := f.readSlot(file, int64(slot*f.slotBytes))
		if ok && number > f.number {
			f.number, newest = number, content
		}
	}
	return newest, nil
}

func (f *slotFile) readSlot(file io.ReaderAt, at int64) (number uint64, content []byte, ok bool) {
	var h slotHeader
	head := make([]byte, codeBytes+binary.Size(h))
	if _, err := file.ReadAt(head, at); err != nil {
		return 0, nil, false
	}
	_, err := binary.Decode(head[codeBytes:], binary.BigEndian, &h)
	if err != nil || h.Version != slotVersion || h.Length > uint64(f.slotBytes) {
		return 0, nil, false
	}
	content = make([]byte, h.Length)
	if _, err := file.ReadAt(content, at+int64(len(head))); err != nil {
		return 0, nil, false
	}
	return h.Number, content, hmac.Equal(head[:codeBytes], f.code(append(head[codeBytes:], content...)))
}

// write makes the content durable, if it takes at most this many bytes with its header.
func (f *slotFile) write(content []byte, most int) error {
	h := slotHeader{slotVersion, f.number + 1, uint64(len(content))}
	raw, err := binary.Append(nil, binary.BigEndian, h)
	if err != nil {
		return err
	}
	raw = append(raw, content...)
	raw = append(f.code(raw), raw...)
	if len(raw) > most {
		return errSlotFull
	}
	flags := os.O_WRONLY
	if f.create {
		flags |= os.O_CREATE
	}
	file, err := os.OpenFile(f.path, flags, 0o600)
	if err != nil {
		return err
	}
	_, err = file.WriteAt(raw, int64(h.Number%slots)*int64(f.slotBytes))
	if err == nil {
		err = unix.Fdatasync(int(file.Fd()))
	}
	if err = errors.Join(err, file.Close()); err == nil {
		f.number = h.Number
	}
	return err
}
