package runtime

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/core/remotes"
	remoteserrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/containerd/v2/pkg/archive"
	"github.com/containerd/errdefs"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

const (
	// stallTimeout ends a connection on which no byte of a layer arrives.
	stallTimeout = 30 * time.Second
	// maxResumes is how often in a row a layer is taken up again without one more byte.
	maxResumes = 5
	// resumePause is the wait before a layer is taken up again, and grows by as much with each failure in a row.
	resumePause = 500 * time.Millisecond
	// streamBufferBytes is read at once from a layer.
	streamBufferBytes = 256 << 10
	// maxZstdWindow bounds a layer's memory, which holds up to two windows; it is the most that zstd makes without --long.
	maxZstdWindow = 128 << 20
)

var (
	// errWrongContent says that bytes are not those of their digest.
	errWrongContent = errors.New("content is not what its digest says")
	// errBadImage says that manifest and configuration do not make an image.
	errBadImage = errors.New("not a valid image")
)

// apply fetches a layer and unpacks it to its staging directory in one pass, and checks each byte against its digest.
func (u *unpacking) apply(ctx context.Context, l *imageLayer) error {
	compressed := &layerReader{ctx: ctx, fetcher: u.fetcher, desc: l.desc, fetched: &u.progress.done}
	defer func() { _ = compressed.Close() }()
	sum := l.desc.Digest.Algorithm().Digester()
	in := bufio.NewReaderSize(io.TeeReader(compressed, sum.Hash()), streamBufferBytes)
	err := u.applyTar(ctx, l, in)
	if err != nil && (compressed.err != nil || ctx.Err() != nil) {
		return err
	}
	// What follows the archive, or the place where it is broken, belongs to the digest too.
	if _, e := io.Copy(io.Discard, in); e != nil {
		return e
	}
	if sum.Digest() != l.desc.Digest {
		return fmt.Errorf("%w: %s instead of %s", errWrongContent, sum.Digest(), l.desc.Digest)
	}
	if _, ofThisMachine := errors.AsType[unix.Errno](err); err != nil && !ofThisMachine {
		return fmt.Errorf("%w: %w", errBadImage, err)
	}
	return err
}

// applyTar does what containerd's applier does with the layer's mounts, but without a mount.
func (u *unpacking) applyTar(ctx context.Context, l *imageLayer, in *bufio.Reader) error {
	ids := u.r.rootfs.shift()
	plain, err := decompress(in, l.decoders)
	if err != nil {
		return err
	}
	defer func() { _ = plain.Close() }()
	var opts []archive.ApplyOpt
	if l.parent != "" {
		opts = append(opts, archive.WithConvertWhiteout(archive.OverlayConvertWhiteout))
	} else if err := ids.dir(l.dir); err != nil {
		return err
	}
	l.inherited = inheritedDirs{}
	opts = append(opts, archive.WithFilter(func(entry *tar.Header) (bool, error) {
		if l.parent != "" || ids.base != 0 {
			if err := l.inherited.note(l.dir, entry); err != nil {
				return false, err
			}
		}
		return true, ids.entry(entry)
	}))
	if _, err := archive.Apply(ctx, l.dir, io.TeeReader(plain, u.writeback), opts...); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, plain) // gzip's checksum stands at the end
	return err
}

// decompress recognises a layer's compression by its first bytes, as containerd does. decoders is how many blocks of
// zstd are decoded at once.
func decompress(in *bufio.Reader, decoders int) (io.ReadCloser, error) {
	magic, err := in.Peek(4)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	switch {
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		return gzip.NewReader(in)
	case bytes.Equal(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}),
		len(magic) == 4 && magic[0]&0xf0 == 0x50 && bytes.Equal(magic[1:], []byte{0x2a, 0x4d, 0x18}): // skippable frame
		// Low memory holds one window and moves all of it with each MiB. A decoder alone may hold two; several allocate for
		// each block too, and with two windows would reach the unit's GOMEMLIMIT. The layer's digest covers each byte,
		// and makes the checksums in the frames unnecessary.
		d, err := zstd.NewReader(in, zstd.WithDecoderMaxWindow(maxZstdWindow), zstd.WithDecoderLowmem(decoders > 1),
			zstd.WithDecoderConcurrency(decoders), zstd.IgnoreChecksum(true))
		if err != nil {
			return nil, err
		}
		return d.IOReadCloser(), nil
	}
	return io.NopCloser(in), nil
}

// layerReader reads a blob from the registry, and takes it up where a connection was cut.
type layerReader struct {
	ctx     context.Context //nolint:containedctx // it lives as long as one apply
	fetcher remotes.Fetcher
	desc    ocispec.Descriptor
	// fetched counts the bytes of all layers of a pull.
	fetched *atomic.Int64

	body   io.ReadCloser
	cancel context.CancelFunc
	offset int64
	// skip is what a registry sends again; noRanges says that it refuses to send less.
	skip     int64
	noRanges bool
	// failures counts those in a row without progress; err is the one that ended the stream.
	failures int
	err      error
}

func (l *layerReader) Read(p []byte) (int, error) {
	for l.err == nil {
		n, err := l.readOnce(p)
		if n > 0 {
			l.offset += int64(n)
			l.fetched.Add(int64(n))
			l.failures = 0
		}
		switch {
		case l.offset > l.desc.Size || errdefs.IsFailedPrecondition(err):
			l.err = fmt.Errorf("%w: more than %d bytes", errWrongContent, l.desc.Size)
			return 0, l.err
		case n > 0:
			if err != nil {
				_ = l.Close()
			}
			return n, nil
		case errors.Is(err, io.EOF) && l.offset == l.desc.Size:
			return 0, io.EOF
		case err != nil:
			_ = l.Close()
			l.err = l.pause(err)
		}
	}
	return 0, l.err
}

// readOnce opens the blob at the offset if it is not open. Where a registry ignores a range, the fetcher skips what was
// read; where one refuses it, readOnce does.
func (l *layerReader) readOnce(p []byte) (int, error) {
	if l.body == nil {
		ctx, cancel := context.WithCancel(l.ctx)
		body, err := l.fetcher.Fetch(ctx, l.desc)
		if err != nil {
			cancel()
			return 0, err
		}
		l.body, l.cancel, l.skip = body, cancel, l.offset
		if seeker, is := body.(io.Seeker); is && !l.noRanges {
			if _, err := seeker.Seek(l.offset, io.SeekStart); err != nil {
				return 0, err
			}
			l.skip = 0
		}
	}
	stalled := time.AfterFunc(stallTimeout, l.cancel)
	defer stalled.Stop()
	if l.skip == 0 {
		return l.body.Read(p)
	}
	n, err := l.body.Read(p[:min(int64(len(p)), l.skip)])
	l.skip -= int64(n)
	return 0, err
}

// pause returns the error that ends the stream: the first request's, because the pull as a whole is tried again, and
// what does not pass by trying again.
func (l *layerReader) pause(err error) error {
	l.failures++
	if l.ctx.Err() != nil {
		return l.ctx.Err()
	}
	if l.offset == 0 || l.failures > maxResumes {
		return err
	}
	var status remoteserrors.ErrUnexpectedStatus
	l.noRanges = errors.As(err, &status) && status.StatusCode == http.StatusRequestedRangeNotSatisfiable
	select {
	case <-time.After(time.Duration(l.failures) * resumePause):
		return nil
	case <-l.ctx.Done():
		return l.ctx.Err()
	}
}

func (l *layerReader) Close() error {
	if l.body == nil {
		return nil
	}
	err := l.body.Close()
	l.cancel()
	l.body = nil
	return err
}
