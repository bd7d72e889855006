/* The limit on what a sandbox writes to its layer.
 *
 * Knows: the quota group of a btrfs subvolume, and project quotas (XFS, ext4). Refuses to know: how a layer came to be
 * a subvolume or to have a project; storage.py saw to it, and lifted the limit of the run before, because overlayfs
 * mounts read-only what it cannot write to. The limit is set when all is mounted and before anything runs. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/btrfs.h>
#include <linux/dqblk_xfs.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <linux/quota.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "keeper.h"

enum { SECTOR = 512, BLOCK = 4096, SPARE_FILES = 1024, QUOTACTL_FD = 443 };

static int limit_subvolume(int layer, uint64_t bytes)
{
    struct btrfs_ioctl_qgroup_limit_args args = {.lim = {.flags = BTRFS_QGROUP_LIMIT_MAX_RFER, .max_rfer = bytes}};
    return ioctl(layer, BTRFS_IOC_QGROUP_LIMIT, &args);
}

static int limit_project(int layer, uint64_t bytes)
{
    struct fsxattr attributes;
    if (ioctl(layer, FS_IOC_FSGETXATTR, &attributes) < 0)
        return -1;
    if (!attributes.fsx_projid) {
        errno = EINVAL;
        return -1;
    }
    struct fs_disk_quota quota = {
        .d_version = FS_DQUOT_VERSION,
        .d_flags = FS_PROJ_QUOTA,
        .d_fieldmask = FS_DQ_BHARD | FS_DQ_IHARD,
        .d_id = attributes.fsx_projid,
        .d_blk_hardlimit = (bytes + SECTOR - 1) / SECTOR,
        /* What empty files take up is not counted in blocks. Others reach the limit on blocks first. */
        .d_ino_hardlimit = bytes / BLOCK + SPARE_FILES,
    };
    return (int)syscall(QUOTACTL_FD, layer, QCMD(Q_XSETQLIM, PRJQUOTA), quota.d_id, &quota);
}

int set_quota(int layer, uint64_t bytes)
{
    struct statfs below;
    if (fstatfs(layer, &below) < 0)
        return -1;
    return below.f_type == BTRFS_SUPER_MAGIC ? limit_subvolume(layer, bytes) : limit_project(layer, bytes);
}
